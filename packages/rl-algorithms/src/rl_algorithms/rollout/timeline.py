"""`Timeline`: the rows of a branched conversation, concatenated in their order.

A conversation whose template rewrote the past consists of several rows (see
`branches`), but is one episode: the reward of its last row belongs to the first one as
well. Anything that propagates from token to token, such as discounts or future
penalties, is computed along the timeline, which holds the parts of a conversation one
after another and each sampled token once.

```
rows   a1 a2 a3 --  (part 0)                                   split
       b1 b2 -- --  (part 1)    join    a1 a2 a3 b1 b2 c1 c2 c3 c4
       c1 c2 c3 c4  (part 2)
```

Shapes: R rows, S tokens wide; N conversations; T tokens of the longest timeline.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from rl_distributed.batch.batched_data_dict import AnyRows

__all__ = ["Timeline"]


class Timeline:
    """Positions of the tokens of R rows on the timelines of N conversations.

    Rows may come in any order. Rows that are the same part of the same conversation are
    copies, of which one counts.

    Args:
        conversation: [R] conversation of each row; any integers.
        part: [R] index of the part within its conversation, in the order of sampling.
        input_lengths: [R] number of tokens of the rows.
        width: S.
    """

    def __init__(
        self, conversation: Tensor, part: Tensor, input_lengths: Tensor, width: int
    ) -> None:
        num_rows = len(conversation)
        parts = int(part.max()) + 1 if num_rows else 1
        # One integer for each pair, so that one sort finds parts, order and copies.
        keys, self._row = torch.unique(conversation * parts + part, return_inverse=True)
        """Distinct parts in their order, and [R] the index of each row's part."""
        # A part that has copies is read from the first one.
        self._source = torch.full((len(keys),), num_rows).scatter_reduce(
            0, self._row, torch.arange(num_rows), "amin"
        )
        owner = torch.div(keys, parts, rounding_mode="floor")
        _, owner, counts = torch.unique_consecutive(
            owner, return_inverse=True, return_counts=True
        )
        self.conversation = owner[self._row]
        """[R] index of each row's conversation among the N."""
        last = counts.cumsum(0) - 1
        self.last_row = self._source[last]
        """[N] index of the row that holds the end of each conversation."""
        lengths = input_lengths.to(torch.int64)[self._source]
        ends = lengths.cumsum(0)
        begins = (ends - lengths)[last - counts + 1]
        self._shape = len(counts), int((ends[last] - begins).max()) if num_rows else 0
        columns = torch.arange(width)
        self._used = columns < lengths[:, None]
        """[parts, S] mask of the tokens of each part."""
        offsets = (ends - lengths - begins[owner])[:, None] + columns
        self._place = (
            owner[:, None].expand_as(self._used)[self._used],
            offsets[self._used],
        )

    @classmethod
    def of(cls, rows: AnyRows) -> Self:
        """Return the timelines of rows, with or without rows of `unfold_branches`."""
        every = torch.arange(rows.size)
        return cls(
            rows.get("conversation_index", every),
            rows.get("part_index", torch.zeros_like(every)),
            rows["input_lengths"],
            rows["token_mask"].shape[1],
        )

    def join(self, column: Tensor) -> Tensor:
        """Convert token values [R, S] to [N, T]; 0 after the end of a timeline."""
        joined = column.new_zeros(self._shape)
        joined[self._place] = column[self._source][self._used]
        return joined

    def split(self, joined: Tensor) -> Tensor:
        """Convert token values [N, T] to [R, S]; 0 after the end of a row."""
        column = joined.new_zeros(self._used.shape)
        column[self._used] = joined[self._place]
        return column[self._row]
