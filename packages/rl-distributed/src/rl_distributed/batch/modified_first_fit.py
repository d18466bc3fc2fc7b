"""Modified first-fit-decreasing, the bin packing of Johnson and Garey."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from rl_distributed.batch.first_fit import first_fit

__all__ = ["modified_first_fit_decreasing"]


def modified_first_fit_decreasing(
    lengths: NDArray[np.int64], capacity: int
) -> list[list[int]]:
    """Pack sequences of valid lengths into bins.

    Every large sequence (above half a bin) opens a bin, in decreasing order. Bins are
    then visited from the fullest to the emptiest for one medium sequence (above a
    third), backwards for two small ones (above a sixth) where there is no medium one,
    and forwards for whatever still fits. First-fit-decreasing packs the rest.
    """
    order = np.argsort(-lengths, kind="stable")
    # Doubled, because half of an odd capacity is not an integer.
    doubled = lengths[order] * 2
    num_large = int(np.searchsorted(-doubled, -capacity, side="left"))
    bins: list[list[int]] = [[int(index)] for index in order[:num_large]]
    room = (capacity - lengths[order[:num_large]]).tolist()
    rest = order[num_large:]
    shelf = _Shelf(lengths, rest)
    medium, small = capacity // 3 + 1, capacity // 6 + 1
    has_medium = [
        _take_one(shelf, bins, room, place, medium) for place in range(num_large)
    ]
    for place in reversed(range(num_large)):
        if not has_medium[place]:
            _take_pair(shelf, bins, room, place, small, medium)
    for place in range(num_large):
        while _take_one(shelf, bins, room, place, 1):
            pass
    return bins + first_fit(lengths, shelf.left_over(rest), capacity)


def _take_one(
    shelf: _Shelf, bins: list[list[int]], room: list[int], place: int, shortest: int
) -> bool:
    """Put the longest sequence of at least `shortest` that fits into bin `place`."""
    length = shelf.longest(room[place])
    if length < shortest:
        return False
    bins[place].append(shelf.take(length))
    room[place] -= length
    return True


def _take_pair(
    shelf: _Shelf,
    bins: list[list[int]],
    room: list[int],
    place: int,
    shortest: int,
    limit: int,
) -> None:
    """Put the shortest small sequence, and the longest beside it, into a bin."""
    first = shelf.shortest(shortest)
    if not 0 < first < limit or not shelf.has_pair(first, room[place], limit):
        return
    bins[place].append(shelf.take(first))
    room[place] -= first
    second = shelf.longest(min(room[place], limit - 1))
    bins[place].append(shelf.take(second))
    room[place] -= second


class _Shelf:
    """Sequences not packed yet: finds the longest up to a limit, the shortest from one.

    Both are union-find lookups over the distinct lengths, since sequences only leave.
    """

    def __init__(self, lengths: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        # Reversed, so that popping a stack returns its first sequence first.
        ascending = indices[::-1]
        distinct, starts = np.unique(lengths[ascending], return_index=True)
        ends = [*starts[1:].tolist(), len(ascending)][: len(starts)]
        self._distinct: list[int] = distinct.tolist()
        items = ascending.tolist()
        self._stacks: list[list[int]] = [
            items[start:end] for start, end in zip(starts.tolist(), ends, strict=True)
        ]
        count = len(self._distinct)
        # Slot 0 stands for "none shorter", slot count + 1 for "none longer".
        self._down = list(range(count + 2))
        self._up = list(range(count + 2))

    def longest(self, limit: int) -> int:
        """Return the longest length up to `limit`, or 0."""
        slot = _find(self._down, bisect.bisect_right(self._distinct, limit))
        return self._distinct[slot - 1] if slot else 0

    def shortest(self, limit: int) -> int:
        """Return the shortest length from `limit` on, or 0."""
        slot = _find(self._up, bisect.bisect_left(self._distinct, limit) + 1)
        return self._distinct[slot - 1] if slot <= len(self._distinct) else 0

    def has_pair(self, first: int, room: int, limit: int) -> bool:
        """Whether the two shortest of `first..limit-1` fit into `room` together."""
        slot = bisect.bisect_left(self._distinct, first)
        if len(self._stacks[slot]) > 1:
            return 2 * first <= room
        second = self.shortest(first + 1)
        return 0 < second < limit and first + second <= room

    def take(self, length: int) -> int:
        """Remove a sequence of exactly `length`, the one that was given first."""
        slot = bisect.bisect_left(self._distinct, length)
        item = self._stacks[slot].pop()
        if not self._stacks[slot]:
            self._down[slot + 1] = slot
            self._up[slot + 1] = slot + 2
        return item

    def left_over(self, indices: NDArray[np.int64]) -> list[int]:
        """Return the sequences of `indices` that were not taken, in their order."""
        left = {item for stack in self._stacks for item in stack}
        return [item for item in indices.tolist() if item in left]


def _find(parents: list[int], slot: int) -> int:
    root = slot
    while parents[root] != root:
        root = parents[root]
    # Path compression makes later lookups nearly constant.
    while parents[slot] != root:
        parents[slot], slot = root, parents[slot]
    return root
