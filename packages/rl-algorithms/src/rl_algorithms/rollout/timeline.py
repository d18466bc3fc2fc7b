"""`Timeline`: the rows of a branched conversation, strung together in their order.

A conversation whose template rewrote the past is several rows (see `branches`), but one
episode: what its last row earns is owed to the first one as well. Whatever follows from
one token to the next, such as discounts or penalties that are still to come, is
computed along the timeline; the parts of a conversation follow each other there, and
what was sampled stands in it once.

```
rows   a1 a2 a3 --  (part 0)                                   split
       b1 b2 -- --  (part 1)    join    a1 a2 a3 b1 b2 c1 c2 c3 c4
       c1 c2 c3 c4  (part 2)
```

Shapes: R rows, S tokens wide; N conversations; T tokens of the longest timeline.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["Timeline"]


class Timeline:
    """Where the tokens of R rows lie on the timelines of N conversations.

    Rows may come in any order. Two rows that are the same part of one conversation are
    copies, of which one counts.

    Args:
        conversation: [R] which conversation a row belongs to; any integers.
        part: [R] which of its parts the row is, in the order of sampling.
        input_lengths: [R] tokens of the rows.
        width: S.
    """

    def __init__(
        self, conversation: Tensor, part: Tensor, input_lengths: Tensor, width: int
    ) -> None:
        num_rows = len(conversation)
        parts = int(part.max()) + 1 if num_rows else 1
        keys, self._row = torch.unique(conversation * parts + part, return_inverse=True)
        """The distinct parts in their order, and [R] which of them a row is."""
        # A part is read from the first row that has it.
        self._source = torch.full((len(keys),), num_rows).scatter_reduce(
            0, self._row, torch.arange(num_rows), "amin"
        )
        owner = torch.div(keys, parts, rounding_mode="floor")
        _, owner, counts = torch.unique_consecutive(
            owner, return_inverse=True, return_counts=True
        )
        self.conversation = owner[self._row]
        """[R] place of a row's conversation among the N."""
        last = counts.cumsum(0) - 1
        self.last_row = self._source[last]
        """[N] the row that holds the end of each conversation."""
        lengths = input_lengths.to(torch.int64)[self._source]
        ends = lengths.cumsum(0)
        begins = (ends - lengths)[last - counts + 1]
        self._shape = len(counts), int((ends[last] - begins).max()) if num_rows else 0
        columns = torch.arange(width)
        self._used = columns < lengths[:, None]
        """[parts, S] where their tokens are, and where these are on the timelines."""
        offsets = (ends - lengths - begins[owner])[:, None] + columns
        self._place = (
            owner[:, None].expand_as(self._used)[self._used],
            offsets[self._used],
        )

    @classmethod
    def of(cls, rows: BatchedDataDict[Any]) -> Self:
        """Return the timelines of rows that `unfold_branches` may have added to."""
        every = torch.arange(rows.size)
        return cls(
            rows.get("conversation_index", every),
            rows.get("part_index", torch.zeros_like(every)),
            rows["input_lengths"],
            rows["token_mask"].shape[1],
        )

    def join(self, column: Tensor) -> Tensor:
        """Turn [R, S] values of tokens into [N, T], 0 behind the end of a timeline."""
        joined = column.new_zeros(self._shape)
        joined[self._place] = column[self._source][self._used]
        return joined

    def split(self, joined: Tensor) -> Tensor:
        """Turn [N, T] values of tokens into [R, S], 0 behind the end of a row."""
        column = joined.new_zeros(self._used.shape)
        column[self._used] = joined[self._place]
        return column[self._row]
