"""The order of rows in the cache, and which of them attend together.

```
             columns                                    segment    place
oldest row   p p p p g g g g g g g g g g g g g g g g g  |          0
             - - - p p p g g g g g g g g g g g g g g g  |          1
             - - - - - - - - - - - p p p p g g g g g g    |        2
             - - - - - - - - - - - - - p p p g g g g g    |        3
newest row   - - - - - - - - - - - - - - - p p p p g g    |        4
```
All rows end in the newest column. A segment looks at the columns from the first one of
its rows on, so rows that begin in about the same column should stand together. Where
rows join a running batch, the newest stand last, and the places are cut into *groups*:
no row of a group begins later than a row of the next one. The place of a row that
leaves goes to the oldest row of the groups behind it, whose place then becomes free in
turn: one move per group at most, where a full order would move every row behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Segment", "group_ends", "plan_moves", "plan_segments"]

IntArray = npt.NDArray[np.int64]

# A further segment costs about as much as attending to this many elements of the cache.
_SEGMENT_ELEMENTS = 50_000
# Where groups end, as shares of the rows: ages of rows that end by chance have a long
# tail, so few rows are much older than the rest.
_GROUP_ENDS = (1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[first, last)`, which attend to the columns from `start` on."""

    first: int
    last: int
    start: int


def plan_segments(starts_B: IntArray, row_elements: int) -> list[Segment]:
    """Start a new segment where it saves more than it costs.

    Args:
        starts_B: First column of each row.
        row_elements: Elements of a row's keys in one column.
    """
    # The earliest column of a row and of all behind it, whatever their order.
    bound = np.minimum.accumulate(starts_B[::-1])[::-1]
    count, firsts = len(starts_B), [0]
    if count and bound[0] != bound[-1]:
        for row in range(count // 8, count, max(1, count // 8)):
            saved = int(bound[row] - bound[firsts[-1]]) * (count - row)
            if saved * row_elements > _SEGMENT_ELEMENTS:
                firsts.append(row)
    return [
        Segment(first, last, int(bound[first]))
        for first, last in zip(firsts, [*firsts[1:], count], strict=True)
        if last > first
    ]


def group_ends(num_rows: int) -> list[int]:
    """Return where each group but the last ends, in a batch of `num_rows` rows."""
    return [int(num_rows * share) for share in _GROUP_ENDS]


def plan_moves(
    alive_B: npt.NDArray[np.bool_], starts_B: IntArray, ends: Sequence[int]
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield moves after which the rows that stay are the first, in order of groups.

    Args:
        alive_B: Rows that stay.
        starts_B: First column of each row.
        ends: Places where groups end, rising; the last group ends with the rows.

    Yields:
        Free places, and the places behind them whose rows move there; both rising in
        the sequence of moves, so that none overwrites a row that moves later.
    """
    taken, count, first = alive_B.copy(), int(alive_B.sum()), 0
    for end in [*(end for end in ends if end < count), count]:
        holes = first + np.flatnonzero(~taken[first:end])
        first = end
        if not len(holes):
            continue
        behind = end + np.flatnonzero(taken[end:])
        oldest = np.argsort(starts_B[behind], kind="stable")[: len(holes)]
        movers = behind[oldest]
        taken[movers] = False
        yield holes, movers
