"""Attention of Megatron-core's layers without scores of each token for each other.

Megatron-core has such an attention in Transformer Engine alone. Its own local one keeps
the scores, whose memory grows with the square of a row's length, for the backward pass.

It can be replaced while sampling, which has our own cache of keys and values: the
static one of Megatron-core has one length for all rows of a batch, and its paged one
needs flash attention, and thus a GPU.

Letters in shapes: S columns, b rows, n packed rows, T packed tokens, H query heads, K
key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_models.ops.packed_attention import packed_attention

__all__ = ["Attend", "Attention", "attending_by"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's number, [T, H, D] queries and [T, K, D] keys and values to [T, H, D].
Heads are those of this tensor rank."""

# A context variable, because Megatron-core's layers pass on no argument of ours.
_active: ContextVar[Attend | None] = ContextVar("rl_megatron_attend", default=None)


@contextmanager
def attending_by(attend: Attend) -> Iterator[None]:
    """Have layers take one row of packed tokens and use this attention."""
    token = _active.set(attend)
    try:
        yield
    finally:
        _active.reset(token)


class Attention(DotProductAttention):  # type: ignore[misc]
    """Causal attention of torch, within rows or packed rows; or `attending_by`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **settings: Any
    ) -> Tensor:
        """Attend; [S, b, H, D] and [S, b, K, D] to [S, b, H * D].

        Under `attending_by` and of packed rows S is T and b is 1.

        Args:
            query: Of this tensor rank's heads.
            key: Likewise.
            value: Likewise.
            mask: [n + 1] borders of packed rows, or None: Megatron-core passes its mask
                on from layer to layer, and again when it recomputes one. Padding needs
                no mask, since it is on the right, where causality hides it.
            settings: Those of Megatron-core's attention, which have no effect.
        """
        attend = _active.get()
        if attend is not None:
            number: int = self.layer_number
            found = attend(number, query[:, 0], key[:, 0], value[:, 0])
            return found.flatten(1)[:, None]
        borders = mask[0] if mask else None
        if borders is not None:
            attended = packed_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                borders,
                scaling=self.softmax_scale,
            )
            return attended.transpose(0, 1).flatten(2)
        attended = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.permute(2, 0, 1, 3).flatten(2)
