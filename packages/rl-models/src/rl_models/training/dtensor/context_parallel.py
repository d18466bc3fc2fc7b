"""Context parallelism: ranks that share the tokens of each row.

```
tokens of this rank -> [q k v of all tokens, for this rank's heads] -> attention
                    -> [tokens of this rank, all heads] -> tokens of this rank
```
Each rank has a contiguous part of the tokens, except within attention, where it has all
tokens and a part of the heads: one all-to-all converts between the two, another one
converts back (Ulysses). So any attention of transformers works as it is, be it causal,
sliding, soft-capped or packed, and all ranks have the same amount of work. Weights are
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
    """Rows whose tokens are shared, as described to attention."""

    ranks: RankGroup
    num_tokens: int
    """T of the rows; the ranks' parts may be longer together."""

    @property
    def per_rank(self) -> int:
        """Number of tokens per rank, including padding at the end."""
        return -(-self.num_tokens // self.ranks.size)

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return self.per_rank * self.ranks.rank

    def part_of(self, whole: Tensor) -> Tensor:
        """[B, T, ...] -> [B, per_rank, ...], padded with zeros."""
        # Equal parts on all ranks, as the all-to-all needs them; T may be any number.
        part = whole[:, self.first : self.first + self.per_rank]
        missing = self.per_rank - part.shape[1]
        if not missing:
            return part.contiguous()
        zeros = whole.new_zeros(part.shape[0], missing, *part.shape[2:])
        return torch.cat([part, zeros], dim=1)

    def inputs(
        self, input_ids: Tensor, position_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the model's arguments for this rank's part of rows [B, T].

        Args:
            input_ids: [B, T], whole.
            position_ids: [1, T] of packed rows; None: each begins with 0.
        """
        told: dict[str, Any] = {"context": self}
        if position_ids is None:
            position_ids = torch.arange(self.num_tokens, device=input_ids.device)[None]
            # Whole, because transformers derives the size of masks from it, and
            # attention sees all tokens.
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
        # One exchange for queries, keys and values: small messages cost mostly latency.
        received = self.ranks.exchange(torch.cat(by_rank, dim=2))
        whole = received.movedim(0, 2).flatten(2, 3)[:, :, : self.num_tokens]
        return list(torch.split(whole, counts, dim=1))

    def all_heads(self, part_B_T_H_D: Tensor) -> Tensor:
        """[B, T, H / R, D] -> [B, per_rank, H, D]."""
        size = self.ranks.size
        # Padding was cut off for attention, and the parts must be of equal size again.
        missing = size * self.per_rank - self.num_tokens
        filled = nn.functional.pad(part_B_T_H_D, (0, 0, 0, 0, 0, missing))
        # Received as [R, B, per_rank, heads, D], the parts of the heads outermost.
        received = self.ranks.exchange(_by_rank(filled, size))
        return received.movedim(0, 2).flatten(2, 3)


def _by_rank(x: Tensor, size: int) -> Tensor:
    """[B, n, ...] -> [R, B, n / R, ...]."""
    return x.reshape(x.shape[0], size, -1, *x.shape[2:]).transpose(0, 1)


def _for_each_rank(part_B_H_T_D: Tensor, num_heads: int, size: int) -> Tensor:
    """Repeat key-value heads if there are too few for each rank to get some."""
    own = part_B_H_T_D.shape[1]
    if own % size == 0:
        return part_B_H_T_D
    # The fewest copies that the ranks divide; one per attention head if that is not a
    # number by which heads group evenly.
    times = math.lcm(own, size) // own
    per_head = num_heads // own
    return part_B_H_T_D.repeat_interleave(per_head if per_head % times else times, 1)


def share_attention(model: Any, layout_name: str, size: int) -> None:
    """Make a model's attention accept the argument `context`, a `ContextTokens`.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head.
        layout_name: The model's name, for messages.
        size: Number of ranks that share the tokens.

    Raises:
        UnsupportedModelError: Attention of the model is out of reach, or something else
            in it mixes tokens.
    """
    # Whatever mixes tokens outside attention would silently see this rank's part only.
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
    """Register a shared form of an attention implementation and return its name."""
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
        # "eager" has no entry in the table: each model file of transformers has its
        # own.
        home: Any = inspect.getmodule(type(module))
        own = getattr(home, "eager_attention_forward", None)
        attention: Any = own if inner == "eager" else ALL_ATTENTION_FUNCTIONS[inner]
        # These are the positions of this rank's tokens, and flash attention would infer
        # borders of packed rows from them.
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
    """Set the attributes of a layer that attention reads while it is computed.

    Args:
        module: The layer.
        inner: Name of the implementation.
        heads_per_key: Number of heads per key, which repeated keys change; None: as is.
    """
    # Restored afterwards: the config is that of the whole model, and is saved with it.
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

    def build_whole_mask(*, q_length: int, kv_length: int, **kwargs: Any) -> Any:
        # The model sees a part of the tokens but a padding mask of all of them, so
        # `q_length` is too short.
        return make(q_length=kv_length, kv_length=kv_length, **kwargs)

    return build_whole_mask


def check_context_layer(
    base: Any, layer: nn.Module, ranks: RankGroup, device: torch.device, name: str
) -> None:
    """Compare a layer that shares its tokens with the same layer on all tokens.

    Args:
        base: The decoder, whose attention is shared.
        layer: Its first layer, whole.
        ranks: Ranks that share the tokens.
        device: Device of the computation.
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
    # Padding has an output too, which nothing reads.
    own = context.part_of(torch.ones(1, NUM_TOKENS, 1))
    pairs = {
        "its output": (found.output * own, context.part_of(wanted.output)),
        "the gradient of its input": (
            found.input_gradient,
            context.part_of(wanted.input_gradient),
        ),
    }
    for key, gradient in found.gradients.items():
        # Each rank has the gradient of its tokens; training adds them up in FSDP.
        total = ranks.total(gradient)
        pairs[f"the gradient of {key}"] = (total, wanted.gradients[key])
    check_differences(pairs, "context", "share the rows of", name)
