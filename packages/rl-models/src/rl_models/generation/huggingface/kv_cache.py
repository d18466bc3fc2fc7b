"""Keys and values of a batch while it is decoded.

```
columns      0 ............ W-1 | W   W+1  ...        W: width of the longest prompt
row 0        p p p p p p p p p  | g   g    .          p prompt, g generated
row 1        - - - - p p p p p  | g   g    .          - masked
row 2        - - - - - - p p p  | g   g    .
```
Prompts end in the same column, so a decoding step appends one column for every row at
once, in buffers that are allocated in full beforehand. Rows are sorted by falling
length; *segments* of rows share the first column that they look at, so short rows do
not pay for the longest one. When rows are finished, others take their places (`keep`),
so that segments stay possible; `row_order` says which.

Rows that join (`admit`) come behind the others, and their prompts end in the newest
column. When the columns are used up, all rows move to the left, over columns that no
row looks at any more: at most once in as many steps as a row may have new tokens.

Letters in shapes: B rows, C columns, H query heads, K key and value heads, R = H / K
query heads per key head, D head size, T packed prompt tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rl_models.generation.huggingface.row_order import (
    Segment,
    group_ends,
    plan_moves,
    plan_segments,
)

__all__ = ["BufferPool", "KVBuffers"]

IntArray = npt.NDArray[np.int64]

# Batched products smaller than this take a slow path of torch on a CPU.
_MIN_PRODUCT = 400


class BufferPool:
    """Flat memory that is reused from call to call."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, int], torch.Tensor] = {}

    def take(
        self, key: tuple[str, int], shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        """Return an uninitialised tensor of that shape.

        It replaces the last one of `key`.
        """
        size = int(np.prod(shape, dtype=np.int64))
        flat = self._flat.get(key)
        usable = (
            flat is not None
            and flat.numel() >= size
            and flat.dtype == like.dtype
            and flat.device == like.device
        )
        if flat is None or not usable:
            flat = self._flat[key] = like.new_empty(size)
        return flat[:size].view(shape)

    def clear(self) -> None:
        """Free the memory."""
        self._flat.clear()


class _SegmentView(NamedTuple):
    """A segment's part of the buffers of a layer; b is its number of rows times K."""

    segment: Segment
    keys: torch.Tensor
    """[b, D, C]"""
    values: torch.Tensor
    """[b, C, D]"""
    mask: torch.Tensor | None
    """[b, 1, C]"""


class KVBuffers:
    """The buffers of all layers, and attention of new tokens over them."""

    def __init__(
        self,
        lengths: IntArray,
        max_new_tokens: int,
        pool: BufferPool | None = None,
        *,
        more_follow: bool = False,
    ) -> None:
        """Plan buffers for rows with prompts of these lengths, sorted falling.

        Args:
            lengths: [B] prompt lengths, the longest first.
            max_new_tokens: Maximum number of tokens sampled per row. The last one is
                never fed back, so it needs no column.
            pool: Memory to use.
            more_follow: Whether rows will join, none of them with a longer prompt.
        """
        self.lengths = lengths
        self.num_rows = len(lengths)
        self._more_follow = more_follow
        self._starts: IntArray = np.zeros(0, dtype=np.int64)
        # Columns that the prompts take which are placed next.
        self._placed = (0, 0)
        # Where no rows join, those in front have begun first anyway.
        self._group_ends = group_ends(len(lengths)) if more_follow else []
        self._max_new = max_new_tokens
        self._pool = pool or BufferPool()
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._mask: torch.Tensor | None = None
        self._segments: list[Segment] = []
        self._views: dict[int, list[_SegmentView]] = {}
        self._min_columns = 1
        self._kv_heads = 0
        self._head_size = 0
        self.width = 0
        self.end = 0
        """Number of columns in use."""

    def _allocate(self, num_heads: int, like: torch.Tensor) -> None:
        """Fix the geometry when the first keys arrive, because they show head sizes."""
        self._kv_heads, self._head_size = int(like.shape[1]), int(like.shape[2])
        repeats = max(1, num_heads // self._kv_heads)
        product = repeats * self._head_size
        self._min_columns = max(16, -(-_MIN_PRODUCT // product))
        self.width = max(int(self.lengths[0]), self._min_columns - 1)
        self.end = self.width
        self._starts = self.width - self.lengths
        self._placed = (0, self.width)
        if self._more_follow or self._starts.any():
            rows = self.num_rows * self._kv_heads
            self._mask = like.new_zeros(rows, 1, self.num_columns)
            self._hide(0)
        self._plan_segments()

    @property
    def num_columns(self) -> int:
        """Number of allocated columns."""
        new = max(1, self._max_new - 1)
        # Twice as many where rows join, so that moving them costs next to nothing.
        return self.width + (2 * new if self._more_follow else new)

    def _hide(self, first_row: int) -> None:
        """Fill the additive mask of the rows from `first_row` on: -inf before a row."""
        if self._mask is None:
            return
        starts = self._starts[first_row:]
        hidden = torch.from_numpy(np.arange(self.num_columns) < starts[:, None])
        hidden = hidden.repeat_interleave(self._kv_heads, 0).to(self._mask.device)
        first = first_row * self._kv_heads
        rows = self._mask[first : first + len(hidden), 0]
        rows.zero_().masked_fill_(hidden, -torch.inf)

    def _plan_segments(self) -> None:
        elements = self._kv_heads * self._head_size
        self._segments = plan_segments(self._starts, elements)
        self._views.clear()

    def admit(self, lengths_N: IntArray) -> int:
        """Add rows behind the others, whose prompts end in the newest column.

        Their keys and values come next, by `place_prompts`. In all there are never more
        rows than in the beginning.

        Args:
            lengths_N: Prompt lengths.

        Returns:
            The place of the first new row.
        """
        first = self.num_rows
        self._starts = np.concatenate([self._starts, self.end - lengths_N])
        self.num_rows += len(lengths_N)
        self._placed = (self.end - int(lengths_N.max()), self.end)
        self._hide(first)
        self._plan_segments()
        return first

    def place_prompts(
        self,
        layer: int,
        keys_T_K_D: torch.Tensor,
        values_T_K_D: torch.Tensor,
        first_row: int,
        first_token_B: IntArray,
        num_heads: int,
    ) -> None:
        """Copy packed keys and values of prompts to all rows that begin with them.

        Args:
            layer: Index of the layer.
            keys_T_K_D: Keys of the packed prompts.
            values_T_K_D: Values of the packed prompts.
            first_row: First of the rows that are filled.
            first_token_B: For each of these rows, where its prompt begins in T.
            num_heads: Query heads of the layer.
        """
        if not self._kv_heads:
            self._allocate(num_heads, keys_T_K_D)
        if layer not in self._keys:
            rows, heads, columns = self.num_rows, keys_T_K_D.shape[1], self.num_columns
            self._keys[layer] = self._pool.take(
                ("k", layer), (rows, heads, columns, keys_T_K_D.shape[2]), keys_T_K_D
            )
            self._values[layer] = self._pool.take(
                ("v", layer), (rows, heads, columns, values_T_K_D.shape[2]), keys_T_K_D
            )
        rows = len(first_token_B)
        index = self._token_of_column(first_row, first_token_B, keys_T_K_D.device)
        last_row = first_row + rows
        left, right = self._placed
        for packed, buffers in ((keys_T_K_D, self._keys), (values_T_K_D, self._values)):
            prompts = packed.index_select(0, index).view(
                rows, right - left, *packed.shape[1:]
            )
            target = buffers[layer][first_row:last_row, :, left:right]
            target.copy_(prompts.transpose(1, 2))

    def _token_of_column(
        self, first_row: int, first_token_B: IntArray, device: torch.device
    ) -> torch.Tensor:
        """Return [B * W] the packed token of each prompt column, masked or not."""
        starts = self._starts[first_row : first_row + len(first_token_B)]
        offset = np.arange(*self._placed) - starts[:, None]
        index = first_token_B[:, None] + np.maximum(offset, 0)
        return torch.from_numpy(index.reshape(-1)).to(device)

    def begin_step(self) -> None:
        """Open the next column; each layer then appends to it."""
        if self.end == self.num_columns:
            self._move_left()
        self.end += 1

    def _move_left(self) -> None:
        """Give up columns that no row looks at; the longest prompt still finds room."""
        free = min(int(self._starts.min()), self.end - self.width)
        for buffer in (*self._keys.values(), *self._values.values()):
            rows = buffer[: self.num_rows]
            # Cloned, as the two ranges overlap.
            rows[:, :, : self.end - free] = rows[:, :, free : self.end].clone()
        self._starts = self._starts - free
        self.end -= free
        self._hide(0)
        self._plan_segments()

    def append(
        self, layer: int, keys_B_K_D: torch.Tensor, values_B_K_D: torch.Tensor
    ) -> None:
        """Write the newest token's keys and values into the open column."""
        column = self.end - 1
        self._keys[layer][: self.num_rows, :, column] = keys_B_K_D
        self._values[layer][: self.num_rows, :, column] = values_B_K_D

    def attend(
        self,
        layer: int,
        query_B_H_D: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention of one new token per row.

        Args:
            layer: Index of the layer.
            query_B_H_D: Queries.
            scale: Factor of the scores.
            window: Sliding window: tokens that are seen, the new one included. Rows
                end in the same column, so it is the same columns for every row.

        Returns:
            [B, H, D_v]
        """
        views = self._views.get(layer)
        if views is None:
            views = self._views[layer] = [self._view(layer, s) for s in self._segments]
        parts = [self._attend(view, query_B_H_D, scale, window) for view in views]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _view(self, layer: int, segment: Segment) -> _SegmentView:
        rows = slice(segment.first, segment.last)
        heads = slice(rows.start * self._kv_heads, rows.stop * self._kv_heads)
        return _SegmentView(
            segment,
            self._keys[layer][rows].flatten(0, 1).transpose(1, 2),
            self._values[layer][rows].flatten(0, 1),
            None if self._mask is None else self._mask[heads],
        )

    def _attend(
        self,
        view: _SegmentView,
        query: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        segment = view.segment
        start = max(0, min(segment.start, self.end - self._min_columns))
        if window is not None:
            start = max(start, self.end - window)
        count = self.end - start
        keys = view.keys.narrow(2, start, count)
        rows, (_, heads, size) = segment.last - segment.first, query.shape
        query = query[segment.first : segment.last].reshape(len(keys), -1, size)
        if view.mask is None:
            scores = torch.bmm(query * scale, keys)
        else:
            # One call for product, scale and mask: at these sizes the number of calls
            # is what takes the time.
            mask = view.mask.narrow(2, start, count)
            scores = torch.baddbmm(mask, query, keys, alpha=scale)
        values = view.values.narrow(1, start, count)
        return torch.bmm(scores.softmax(dim=-1), values).view(rows, heads, -1)

    def keep(self, alive_B: npt.NDArray[np.bool_]) -> IntArray:
        """Drop finished rows; rows behind them move into their places.

        Returns:
            [rows that stay] the place where each row came from.
        """
        source = np.arange(len(alive_B))
        for holes, movers in plan_moves(alive_B, self._starts, self._group_ends):
            self._move_rows(holes, movers)
            source[holes] = movers
        source = source[: int(alive_B.sum())]
        self.num_rows = len(source)
        self._starts = self._starts[source]
        self._plan_segments()
        return source

    def _move_rows(self, holes: IntArray, movers: IntArray) -> None:
        # Columns that the rows do not look at stay as they are.
        columns = slice(int(self._starts[movers].min()), self.end)
        for buffer in (*self._keys.values(), *self._values.values()):
            used = buffer[:, :, columns]
            to, origin = (
                torch.from_numpy(x).to(buffer.device) for x in (holes, movers)
            )
            used.index_copy_(0, to, used.index_select(0, origin))
        if self._mask is not None:
            grouped = self._mask.view(-1, self._kv_heads, self._mask.shape[2])
            device = grouped.device
            grouped[torch.from_numpy(holes).to(device)] = grouped[
                torch.from_numpy(movers).to(device)
            ]
