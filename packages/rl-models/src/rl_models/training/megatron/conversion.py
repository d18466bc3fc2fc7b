"""Conversion of weights between Hugging Face's and Megatron-core's names and shapes.

Letters in shapes: G key-value groups, R tensor ranks.

| Hugging Face | Megatron-core | a tensor rank has |
|---|---|---|
| `embed_tokens`, `lm_head` | `word_embeddings`, `output_layer` | rows, zeros below |
| `q_proj`, `k_proj`, `v_proj` | `linear_qkv` | G/R groups: [queries, key, value] |
| `gate_proj`, `up_proj` | `linear_fc1` | its rows of gate, then its rows of up |
| `o_proj`, `down_proj` | `linear_proj`, `linear_fc2` | columns |
| norms, a scalar head | the same | all |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Entry", "entries", "join", "split"]

Kind = Literal["vocabulary", "attention", "gated", "columns", "whole"]


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
    def is_sharded(self) -> bool:
        """Whether each tensor rank has another part."""
        return self.kind != "whole"


def entries(config: Any, head: Sequence[str] = ()) -> Iterator[Entry]:
    """Yield the parameters of the model of a Hugging Face config, tied ones once.

    Args:
        config: The config.
        head: Parameters of a scalar head that replaces the language-model head.
    """
    embedding = "embedding.word_embeddings.weight"
    yield Entry(embedding, ("model.embed_tokens.weight",), "vocabulary")
    for layer in range(config.num_hidden_layers):
        yield from _of_layer(config.model_type, layer)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
    if head:
        yield from (Entry(name, (name,), "whole") for name in head)
    elif not config.tie_word_embeddings:
        yield Entry("output_layer.weight", ("lm_head.weight",), "vocabulary")


def _of_layer(family: str, layer: int) -> Iterator[Entry]:
    def entry(name: str, kind: Kind, *sources: str) -> Entry:
        there = tuple(f"model.layers.{layer}.{source}" for source in sources)
        return Entry(f"decoder.layers.{layer}.{name}", there, kind, layer)

    yield entry("input_layernorm.weight", "whole", "input_layernorm.weight")
    for what in ("weight", "bias") if family == "qwen2" else ("weight",):
        projections = [f"self_attn.{x}_proj.{what}" for x in "qkv"]
        yield entry(f"self_attention.linear_qkv.{what}", "attention", *projections)
    if family == "qwen3":
        for x in "qk":
            name = f"self_attention.{x}_layernorm.weight"
            yield entry(name, "whole", f"self_attn.{x}_norm.weight")
    proj = "self_attention.linear_proj.weight"
    yield entry(proj, "columns", "self_attn.o_proj.weight")
    after = "post_attention_layernorm.weight"
    yield entry("pre_mlp_layernorm.weight", "whole", after)
    gated = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield entry("mlp.linear_fc1.weight", "gated", *gated)
    yield entry("mlp.linear_fc2.weight", "columns", "mlp.down_proj.weight")


def join(
    kind: Kind, parts: Sequence[Tensor], num_groups: int, rank: int, size: int
) -> Tensor:
    """Return a tensor rank's part of a parameter of Megatron-core.

    Args:
        kind: How it is composed.
        parts: The whole tensors of Hugging Face.
        num_groups: G.
        rank: The tensor rank.
        size: R.
    """
    if kind == "whole":
        return parts[0]
    if kind == "columns":
        return parts[0].chunk(size, dim=1)[rank]
    if kind == "gated":
        # Each rank's gate and up rows must belong together: the activation multiplies
        # them. Cutting the joined matrix would give some ranks gates only.
        return torch.cat([part.chunk(size)[rank] for part in parts])
    if kind == "vocabulary":
        # Tensor ranks need equal parts; logits of the padding are masked.
        rows = parts[0]
        missing = -rows.shape[0] % size
        padded = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return padded.chunk(size)[rank]
    # Megatron-core keeps queries, key and value of a group together, so that a rank's
    # part has whole groups.
    shape = parts[0].shape[1:]
    by_group = [part.reshape(num_groups, -1, *shape) for part in parts]
    mine = torch.cat(by_group, dim=1).chunk(size)[rank]
    return mine.reshape(-1, *shape)


def split(
    kind: Kind,
    shards: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    num_groups: int,
) -> list[Tensor]:
    """Return the whole tensors of Hugging Face; the inverse of `join`.

    Args:
        kind: How the parameter is composed.
        shards: The parts of all tensor ranks.
        shapes: Shapes of the whole tensors.
        num_groups: G.
    """
    if kind == "whole":
        return [shards[0]]
    if kind == "columns":
        return [torch.cat(list(shards), dim=1)]
    if kind == "vocabulary":
        # Without the rows that pad it.
        return [torch.cat(list(shards))[: shapes[0][0]]]
    if kind == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[at] for half in halves]) for at in (0, 1)]
    whole = torch.cat(list(shards))
    by_group = whole.reshape(num_groups, -1, *whole.shape[1:])
    sizes = [shape[0] // num_groups for shape in shapes]
    pieces = torch.split(by_group, sizes, dim=1)
    return [
        piece.reshape(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)
    ]
