"""Attention of Megatron-core's layers that can be replaced while sampling.

Sampling uses our own cache of keys and values: the static one of Megatron-core has one
length for all rows of a batch, and its paged one needs flash attention, and thus a GPU.

Letters in shapes: T packed tokens, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

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
    """Megatron-core's own attention, except inside `attending_by`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **settings: Any
    ) -> Tensor:
        """Attend; [T, 1, H, D] and [T, 1, K, D] to [T, 1, H * D] where packed."""
        attend = _active.get()
        if attend is None:
            attended: Tensor = super().forward(query, key, value, *mask, **settings)
            return attended
        number: int = self.layer_number
        return attend(number, query[:, 0], key[:, 0], value[:, 0]).flatten(1)[:, None]
