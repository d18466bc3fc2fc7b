"""Context parallelism: ranks that share the tokens of each row.

```
tokens of this rank -> [q k v of all tokens, for this rank's heads] -> attention
                    -> [tokens of this rank, all heads] -> tokens of this rank
```
Each rank has a contiguous part of the tokens, except within attention, where it has all
tokens and a part of the heads: one all-to-all takes the one to the other, another one
back (Ulysses). So any attention that transformers has works as it is, with its causal,
sliding, soft-capped or packed form, and every rank has the same work. Weights are
sharded over these ranks as over data-parallel ones, and gradients added up over them.

Letters in shapes: B rows, T tokens, R ranks, H heads, D head size.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor.collectives import RankGroup
from rl_models.training.dtensor.layer_probe import (
    NUM_TOKENS,
    LayerProbe,
    check_differences,
    probe_tokens,
)

__all__ = ["ContextTokens", "check_context_layer", "share_attention"]


@dataclass(frozen=True, slots=True)
class ContextTokens:
    """Rows whose tokens are shared, as attention is told of them."""

    ranks: RankGroup
    num_tokens: int
    """T of the rows; the ranks' parts may be longer together."""

    @property
    def per_rank(self) -> int:
        """Tokens of each rank, of which the last ones may be filled up."""
        return -(-self.num_tokens // self.ranks.size)

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return self.per_rank * self.ranks.rank

    def part_of(self, whole: Tensor) -> Tensor:
        """[B, T, ...] -> [B, per_rank, ...], filled up with zeros."""
        part = whole[:, self.first : self.first + self.per_rank]
        missing = self.per_rank - part.shape[1]
        if not missing:
            return part.contiguous()
        zeros = whole.new_zeros(part.shape[0], missing, *part.shape[2:])
        return torch.cat([part, zeros], dim=1)

    def inputs(
        self, input_ids: Tensor, position_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """Return what the model is told of this rank's part of rows [B, T].

        Args:
            input_ids: [B, T], whole.
            position_ids: [1, T] of packed rows; None: each begins with 0.
        """
        told: dict[str, Any] = {"context": self}
        if position_ids is None:
            position_ids = torch.arange(self.num_tokens, device=input_ids.device)[None]
            # By its length masks are made for all tokens.
            told["attention_mask"] = torch.ones_like(input_ids)
        told["input_ids"] = self.part_of(input_ids)
        told["position_ids"] = self.part_of(position_ids)
        return told

    def join(self, part: Tensor) -> Tensor:
        """[B, per_rank, ...] -> [B, T, ...], for what every rank computes alike."""
        return self.ranks.join(part, 1)[:, : self.num_tokens]

    def all_tokens(self, *parts_B_H_T_D: Tensor) -> list[Tensor]:
        """[B, H, per_rank, D] each -> [B, H / R, T, D].

        Of key-value heads, each rank gets those of its attention heads.
        """
        size, num_heads = self.ranks.size, parts_B_H_T_D[0].shape[1]
        repeated = [_for_each_rank(x, num_heads, size) for x in parts_B_H_T_D]
        by_rank = [_by_rank(x, size) for x in repeated]
        counts = [x.shape[2] for x in by_rank]
        # Received as [R, B, heads, per_rank, D], the parts of the tokens outermost.
        received = self.ranks.exchange(torch.cat(by_rank, dim=2))
        whole = received.movedim(0, 2).flatten(2, 3)[:, :, : self.num_tokens]
        return list(torch.split(whole, counts, dim=1))

    def all_heads(self, part_B_T_H_D: Tensor) -> Tensor:
        """[B, T, H / R, D] -> [B, per_rank, H, D]."""
        size = self.ranks.size
        missing = size * self.per_rank - self.num_tokens
        filled = nn.functional.pad(part_B_T_H_D, (0, 0, 0, 0, 0, missing))
        # Received as [R, B, per_rank, heads, D], the parts of the heads outermost.
        received = self.ranks.exchange(_by_rank(filled, size))
        return received.movedim(0, 2).flatten(2, 3)


def _by_rank(x: Tensor, size: int) -> Tensor:
    """[B, n, ...] -> [R, B, n / R, ...]."""
    return x.reshape(x.shape[0], size, -1, *x.shape[2:]).transpose(0, 1)


def _for_each_rank(part_B_H_T_D: Tensor, num_heads: int, size: int) -> Tensor:
    """Repeat key-value heads that are too few to deal out."""
    own = part_B_H_T_D.shape[1]
    if own % size == 0:
        return part_B_H_T_D
    times = math.lcm(own, size) // own
    per_head = num_heads // own
    return part_B_H_T_D.repeat_interleave(per_head if per_head % times else times, 1)


def share_attention(model: Any, layout_name: str, size: int) -> None:
    """Let attention of a model take the argument `context`, a `ContextTokens`.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head.
        layout_name: The model's name, for messages.
        size: Ranks that are to share the tokens.

    Raises:
        UnsupportedModelError: Attention of the model is out of reach, or something else
            in it mixes tokens.
    """
    config = model.config
    mixers = set(getattr(config, "layer_types", None) or []) - {
        "full_attention",
        "sliding_attention",
    }
    obstacle = None
    if not getattr(model, "_supports_attention_backend", False):
        obstacle = f"{type(model).__name__} does not look its attention up"
    elif mixers:
        obstacle = f"it has layers of type {', '.join(sorted(mixers))}"
    elif "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        obstacle = f"{type(model).__name__} takes no position_ids"
    elif getattr(config, "output_router_logits", False):
        obstacle = "its loss of the routers needs all tokens (output_router_logits)"
    if obstacle is not None:
        raise UnsupportedModelError(
            f"policy.parallelism.context cannot share the rows of {layout_name} "
            f"between {size} workers: {obstacle}; set it to 1"
        )
    config._attn_implementation = _registered(config._attn_implementation)


def _registered(inner: str) -> str:
    """Name an implementation whose tokens may be shared, over one that has them all."""
    name = f"rl_context_{inner}"
    AttentionInterface.register(name, _shared_attention(inner))
    AttentionMaskInterface.register(name, _whole_mask(inner))
    return name


def _shared_attention(inner: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        context: ContextTokens | None = None,
        **kwargs: Any,
    ) -> Any:
        # "eager" is no entry of the table: each file of transformers has its own.
        home: Any = inspect.getmodule(type(module))
        own = getattr(home, "eager_attention_forward", None)
        attention: Any = own if inner == "eager" else ALL_ATTENTION_FUNCTIONS[inner]
        # They are those of this rank's tokens, of which flash attention would conclude
        # where packed rows begin.
        kwargs.pop("position_ids", None)
        if context is None:
            with _told(module, inner, None):
                return attention(module, query, key, value, attention_mask, **kwargs)
        whole = context.all_tokens(query, key, value)
        with _told(module, inner, whole[0].shape[1] // whole[1].shape[1]):
            attended, _ = attention(module, *whole, attention_mask, **kwargs)
        return context.all_heads(attended), None

    return attend


@contextmanager
def _told(module: Any, inner: str, heads_per_key: int | None) -> Iterator[None]:
    """Tell a layer what attention looks up there while it is computed.

    Args:
        module: The layer.
        inner: Name of the implementation.
        heads_per_key: Heads that share a key, which repeated keys change; None: as is.
    """
    groups = getattr(module, "num_key_value_groups", None)
    name = module.config._attn_implementation
    module.config._attn_implementation = inner
    if groups is not None and heads_per_key is not None:
        module.num_key_value_groups = heads_per_key
    try:
        yield
    finally:
        module.config._attn_implementation = name
        if groups is not None:
            module.num_key_value_groups = groups


def _whole_mask(inner: str) -> Callable[..., Any]:
    make = ALL_MASK_ATTENTION_FUNCTIONS[inner]

    def make_whole(*, q_length: int, kv_length: int, **kwargs: Any) -> Any:
        # The model sees a part of the tokens, and a padding mask of all of them.
        return make(q_length=kv_length, kv_length=kv_length, **kwargs)

    return make_whole


def check_context_layer(
    base: Any, layer: nn.Module, ranks: RankGroup, device: torch.device, name: str
) -> None:
    """Compare a layer whose tokens are shared with what it computes of all of them.

    Args:
        base: The decoder, of which attention is shared.
        layer: Its first layer, whole.
        ranks: Those that share the tokens.
        device: Where they compute.
        name: The model's name, for the message.

    Raises:
        UnsupportedModelError: They differ.
    """
    context = ContextTokens(ranks, NUM_TOKENS)
    tokens = probe_tokens(base)
    whole = LayerProbe(base, layer)
    wanted = whole.whole(layer)
    probe = LayerProbe(
        base, layer, context.inputs(tokens), context.part_of(whole.weight)
    )
    found = probe.ask(copy.deepcopy(layer).to(device), device)
    own = context.part_of(torch.ones(1, NUM_TOKENS, 1))
    pairs = {
        "its output": (found.output * own, context.part_of(wanted.output)),
        "the gradient of its input": (
            found.input_gradient,
            context.part_of(wanted.input_gradient),
        ),
    }
    for key, gradient in found.gradients.items():
        total = ranks.total(gradient)
        pairs[f"the gradient of {key}"] = (total, wanted.gradients[key])
    check_differences(pairs, "context", "share the rows of", name)
