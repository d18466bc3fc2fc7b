"""Conversion of weights between Hugging Face's and Megatron-core's names and shapes.

Each rank has a box of every tensor of Hugging Face that it has a part of, so that it
reads and writes its part without the whole tensor.

Letters in shapes: G key-value groups, R tensor ranks.

| Hugging Face | Megatron-core | a rank has |
|---|---|---|
| `embed_tokens`, `lm_head` | `word_embeddings`, `output_layer` | rows, zeros below |
| `q_proj`, `k_proj`, `v_proj` | `linear_qkv` | G/R groups: [queries, key, value] |
| `gate_proj`, `up_proj` | `linear_fc1` | its rows of gate, then its rows of up |
| `o_proj`, `down_proj` | `linear_proj`, `linear_fc2` | columns |
| `experts` | `experts` | some experts, whole |
| norms, routers, a scalar head | the same | all |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_models.checkpoint.sharded import Box

__all__ = ["Entry", "box_of", "entries", "has_experts", "join", "split", "unite"]

Kind = Literal["vocabulary", "attention", "gated", "columns", "experts", "whole"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter of Megatron-core, and the Hugging Face parameters it consists of."""

    name: str
    """In Megatron-core, layers counted over all stages."""
    sources: tuple[str, ...]
    """In Hugging Face."""
    kind: Kind
    layer: int | None = None
    """Number of the layer; None: it is outside of the layers."""

    @property
    def is_of_experts(self) -> bool:
        """Whether ranks that share the experts have other ones each."""
        return self.kind == "experts"

    @property
    def is_cut(self) -> bool:
        """Whether each tensor rank has another part."""
        return self.kind not in ("whole", "experts")


def has_experts(config: Any, layer: int) -> bool:
    """Return whether a layer of a Hugging Face config is a mixture of experts."""
    if config.model_type != "qwen3_moe" or layer in config.mlp_only_layers:
        return False
    return bool((layer + 1) % config.decoder_sparse_step == 0)


def entries(config: Any, head: Sequence[str] = ()) -> Iterator[Entry]:
    """Yield the parameters of the model of a Hugging Face config, tied ones once.

    Args:
        config: The config.
        head: Parameters of a scalar head that replaces the language-model head.
    """
    embedding = "embedding.word_embeddings.weight"
    yield Entry(embedding, ("model.embed_tokens.weight",), "vocabulary")
    for layer in range(config.num_hidden_layers):
        yield from _of_layer(config, layer)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
    if head:
        yield from (Entry(name, (name,), "whole") for name in head)
    elif not config.tie_word_embeddings:
        yield Entry("output_layer.weight", ("lm_head.weight",), "vocabulary")


def _of_layer(config: Any, layer: int) -> Iterator[Entry]:
    family = config.model_type

    def entry(name: str, kind: Kind, *sources: str) -> Entry:
        there = tuple(f"model.layers.{layer}.{source}" for source in sources)
        return Entry(f"decoder.layers.{layer}.{name}", there, kind, layer)

    yield entry("input_layernorm.weight", "whole", "input_layernorm.weight")
    for what in ("weight", "bias") if family == "qwen2" else ("weight",):
        projections = [f"self_attn.{x}_proj.{what}" for x in "qkv"]
        yield entry(f"self_attention.linear_qkv.{what}", "attention", *projections)
    if family in ("qwen3", "qwen3_moe"):
        for x in "qk":
            name = f"self_attention.{x}_layernorm.weight"
            yield entry(name, "whole", f"self_attn.{x}_norm.weight")
    proj = "self_attention.linear_proj.weight"
    yield entry(proj, "columns", "self_attn.o_proj.weight")
    after = "post_attention_layernorm.weight"
    yield entry("pre_mlp_layernorm.weight", "whole", after)
    if has_experts(config, layer):
        yield entry("mlp.router.weight", "whole", "mlp.gate.weight")
        for part in ("gate_up_proj", "down_proj"):
            name = f"mlp.experts.{part}"
            yield entry(name, "experts", name)
        return
    gated = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield entry("mlp.linear_fc1.weight", "gated", *gated)
    yield entry("mlp.linear_fc2.weight", "columns", "mlp.down_proj.weight")


def box_of(kind: Kind, shape: Sequence[int], rank: int, size: int) -> Box:
    """Return which part of a tensor of Hugging Face a rank has.

    Args:
        kind: How the parameter is composed.
        shape: Shape of the whole tensor.
        rank: The tensor rank, or the one among those that share the experts.
        size: Number of these ranks.
    """
    if kind == "whole":
        return Box.whole(shape)
    dim = 1 if kind == "columns" else 0
    # Only a vocabulary may not be divisible: the last ranks then have fewer rows.
    per_rank = -(-shape[dim] // size)
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim] = min(per_rank * rank, shape[dim])
    sizes[dim] = min(per_rank, shape[dim] - starts[dim])
    return Box(tuple(shape), tuple(starts), tuple(sizes))


def join(
    kind: Kind, parts: Sequence[Tensor], num_groups: int, like: Sequence[int]
) -> Tensor:
    """Return a rank's part of a parameter of Megatron-core.

    Args:
        kind: How it is composed.
        parts: This rank's parts of the tensors of Hugging Face.
        num_groups: Key-value groups of this rank.
        like: Shape of the result.
    """
    if kind == "gated":
        # Each rank's gate and up rows must belong together: the activation multiplies
        # them.
        return torch.cat(list(parts))
    if kind == "vocabulary":
        # Tensor ranks need equal parts; logits of the padding are masked.
        missing = like[0] - parts[0].shape[0]
        return torch.cat([parts[0], parts[0].new_zeros(missing, *like[1:])])
    if kind != "attention":
        return parts[0]
    # Megatron-core keeps queries, key and value of a group together.
    tail = parts[0].shape[1:]
    by_group = [part.reshape(num_groups, -1, *tail) for part in parts]
    return torch.cat(by_group, dim=1).reshape(tuple(like))


def split(
    kind: Kind, part: Tensor, boxes: Sequence[Box], num_groups: int
) -> list[Tensor]:
    """Return a rank's parts of the tensors of Hugging Face; the inverse of `join`.

    Args:
        kind: How the parameter is composed.
        part: The rank's part of it.
        boxes: Which parts of the tensors these are.
        num_groups: Key-value groups of this rank.
    """
    if kind == "gated":
        return list(part.chunk(2))
    if kind == "vocabulary":
        return [part[: boxes[0].sizes[0]]]
    if kind != "attention":
        return [part]
    by_group = part.reshape(num_groups, -1, *part.shape[1:])
    rows = [box.sizes[0] // num_groups for box in boxes]
    pieces = torch.split(by_group, rows, dim=1)
    return [p.reshape(box.sizes) for p, box in zip(pieces, boxes, strict=True)]


def unite(kind: Kind, parts: Sequence[Tensor]) -> Tensor:
    """Return a whole tensor of Hugging Face from the parts of all ranks, in order."""
    if kind == "whole":
        return parts[0]
    return torch.cat(list(parts), dim=1 if kind == "columns" else 0)
