"""Pack sequences of different lengths into bins of a fixed token capacity.

All algorithms take O(n log n): equal lengths are placed together, a tree of maxima
finds the first bin with room, and a union-find over the distinct lengths finds the
longest sequence that still fits.
"""

from __future__ import annotations

import bisect
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_distributed.batch.balance import (
    bin_loads,
    load_imbalance,
    lpt_partition,
    split_heaviest,
)
from rl_distributed.errors import PackingError
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "PackingAlgorithm",
    "PackingMetrics",
    "SequencePacker",
    "get_packer",
]

# With a smaller share of extra bins, an even filling hardly ever exists.
_LEAST_SLACK = 1 / 64

Bins: TypeAlias = list[list[int]]
Lengths: TypeAlias = NDArray[np.int64]


class PackingAlgorithm(enum.Enum):
    """Algorithms that choose sequences for bins."""

    CONCATENATIVE = "concatenative"
    """In the given order; a new bin where the next sequence does not fit."""
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    """Longest first, each into the first bin with room."""
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    """In a random (seeded) order, each into the first bin with room."""
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    """Johnson and Garey's five phases: at most 71/60 of the fewest possible bins."""


@dataclass(frozen=True)
class PackingMetrics:
    """Quality of a packing."""

    num_sequences: int
    num_bins: int
    min_num_bins: int
    """The fewest bins that the number of tokens allows."""
    total_tokens: int
    waste_ratio: float
    """The share of the capacity of all bins that stays empty."""
    load_imbalance: float
    """By how much the fullest bin exceeds the mean; 0.0 is perfect balance."""


class SequencePacker(ABC):
    """Packs sequences; `get_packer` makes one.

    Args:
        bin_capacity: The most tokens in a bin.
        collect_metrics: Whether `pack` keeps the metrics of its last call in `metrics`.
        min_bin_count: The fewest bins to make.
        bin_count_multiple: What the number of bins must be a multiple of.
        seed: For algorithms that shuffle.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("bin_capacity", bin_capacity),
            ("min_bin_count", 1 if min_bin_count is None else min_bin_count),
            (
                "bin_count_multiple",
                1 if bin_count_multiple is None else bin_count_multiple,
            ),
        ):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | np.integer)
                or value < 1
            ):
                raise PackingError(f"{name} must be a positive integer: got {value!r}")
        self.bin_capacity = int(bin_capacity)
        self.collect_metrics = collect_metrics
        self.min_bin_count = min_bin_count or 1
        self.bin_count_multiple = bin_count_multiple or 1
        self.seed = seed
        self.metrics: PackingMetrics | None = None

    def pack(self, sequence_lengths: ArrayLike) -> Bins:
        """Return the indices of the sequences in each bin; each is in exactly one.

        Bins above what the sequences need, for `min_bin_count` and
        `bin_count_multiple`, spread the sequences evenly over all bins if they fit
        that way, and otherwise split the fullest ones.

        Raises:
            PackingError: A length is not positive or above the capacity, or there are
                fewer sequences than bins.
        """
        lengths = self._checked(sequence_lengths)
        if lengths.size == 0 and self.min_bin_count == 1 == self.bin_count_multiple:
            return []
        bins = self._adjust_bin_count(self._pack(lengths), lengths)
        if self.collect_metrics:
            self.metrics = self.compute_metrics(lengths, bins)
        return bins

    def compute_metrics(
        self, sequence_lengths: ArrayLike, bins: Sequence[Sequence[int]]
    ) -> PackingMetrics:
        """Waste and imbalance of `bins`."""
        lengths = np.asarray(sequence_lengths, dtype=np.int64)
        loads = bin_loads(bins, lengths)
        total = int(lengths.sum())
        room = len(bins) * self.bin_capacity
        return PackingMetrics(
            num_sequences=int(lengths.size),
            num_bins=len(bins),
            min_num_bins=-(-total // self.bin_capacity),
            total_tokens=total,
            waste_ratio=1.0 - total / room if room else 0.0,
            load_imbalance=load_imbalance(loads),
        )

    @abstractmethod
    def _pack(self, lengths: Lengths) -> Bins:
        """Bins of any number for valid lengths."""

    def _checked(self, sequence_lengths: ArrayLike) -> Lengths:
        array = np.asarray(sequence_lengths)
        if array.size == 0:
            return np.zeros(0, dtype=np.int64)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise PackingError(
                "sequence lengths must be a list of integers: got "
                f"{array.dtype} of shape {array.shape}"
            )
        if array.min() < 1:
            row = int(array.argmin())
            raise PackingError(
                f"sequence lengths must be positive: sequence {row} has {array[row]}"
            )
        if array.max() > self.bin_capacity:
            row = int(array.argmax())
            raise PackingError(
                f"sequence {row} has {array[row]} tokens, but a bin holds "
                f"{self.bin_capacity}; raise the capacity or shorten the sequence"
            )
        # Sums in a narrower type could overflow.
        return array.astype(np.int64)

    def _adjust_bin_count(self, bins: Bins, lengths: Lengths) -> Bins:
        multiple = self.bin_count_multiple
        wanted = -(-max(len(bins), self.min_bin_count) // multiple) * multiple
        if wanted > lengths.size:
            raise PackingError(
                f"{wanted} bins (at least {self.min_bin_count}, a multiple of "
                f"{multiple}) need as many sequences: got {lengths.size}; give more "
                "rows or fewer shards"
            )
        return self._spread(bins, lengths, wanted) if wanted > len(bins) else bins

    def _spread(self, bins: Bins, lengths: Lengths, num_bins: int) -> Bins:
        """Get the same sequences in more bins, evenly filled where that works out."""
        if num_bins - len(bins) >= num_bins * _LEAST_SLACK:
            # Packing again over all bins evens them out, whereas splitting leaves most
            # as full as before.
            even = lpt_partition(lengths.tolist(), num_bins, self.bin_capacity)
            if even is not None:
                return even
        return split_heaviest(bins, lengths, num_bins)


class ConcatenativePacker(SequencePacker):
    """`PackingAlgorithm.CONCATENATIVE`."""

    def _pack(self, lengths: Lengths) -> Bins:
        bins: Bins = []
        room = 0
        for index, length in enumerate(lengths.tolist()):
            if length > room:
                bins.append([])
                room = self.bin_capacity
            bins[-1].append(index)
            room -= length
        return bins

    def _spread(self, bins: Bins, lengths: Lengths, num_bins: int) -> Bins:
        split = split_heaviest(bins, lengths, num_bins, contiguous=True)
        return sorted(split)  # the sequences stay in order over all bins


class FirstFitDecreasingPacker(SequencePacker):
    """`PackingAlgorithm.FIRST_FIT_DECREASING`."""

    def _pack(self, lengths: Lengths) -> Bins:
        order = np.argsort(-lengths, kind="stable").tolist()
        return _first_fit(lengths, order, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """`PackingAlgorithm.FIRST_FIT_SHUFFLE`."""

    def _pack(self, lengths: Lengths) -> Bins:
        order = np.random.default_rng(self.seed).permutation(lengths.size).tolist()
        return _first_fit(lengths, order, self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """`PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING`.

    Every large sequence (above half a bin) opens a bin, in decreasing order. Bins are
    then visited from the fullest to the emptiest for one medium sequence (above a
    third), backwards for two small ones (above a sixth) where there is no medium one,
    and forwards for whatever still fits. First-fit-decreasing packs the rest.
    """

    def _pack(self, lengths: Lengths) -> Bins:
        capacity = self.bin_capacity
        order = np.argsort(-lengths, kind="stable")
        # Doubled, because half of an odd capacity is not an integer.
        doubled = lengths[order] * 2
        num_large = int(np.searchsorted(-doubled, -capacity, side="left"))
        bins: Bins = [[int(index)] for index in order[:num_large]]
        room = (capacity - lengths[order[:num_large]]).tolist()
        rest = order[num_large:]
        shelf = _Shelf(lengths, rest)
        medium, small = capacity // 3 + 1, capacity // 6 + 1
        has_medium = [False] * num_large
        for place in range(num_large):
            has_medium[place] = _take_one(shelf, bins, room, place, medium)
        for place in reversed(range(num_large)):
            if not has_medium[place]:
                _take_pair(shelf, bins, room, place, small, medium)
        for place in range(num_large):
            while _take_one(shelf, bins, room, place, 1):
                pass
        return bins + _first_fit(lengths, shelf.left_over(rest), capacity)


def _take_one(
    shelf: _Shelf, bins: Bins, room: list[int], place: int, shortest: int
) -> bool:
    """Put the longest sequence of at least `shortest` that fits into bin `place`."""
    length = shelf.longest(room[place])
    if length < shortest:
        return False
    bins[place].append(shelf.take(length))
    room[place] -= length
    return True


def _take_pair(
    shelf: _Shelf, bins: Bins, room: list[int], place: int, shortest: int, limit: int
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
    """Unpacked sequences by length: the longest up to a limit, the shortest from one.

    Both are union-find lookups over the distinct lengths, since sequences only leave.
    """

    def __init__(self, lengths: Lengths, indices: NDArray[np.int64]) -> None:
        # Reversed, so that popping a stack returns its first sequence first.
        ascending = indices[::-1]
        distinct, starts = np.unique(lengths[ascending], return_index=True)
        ends = [*starts[1:].tolist(), len(ascending)][: len(starts)]
        self._distinct: list[int] = distinct.tolist()
        items = ascending.tolist()
        self._stacks: Bins = [
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


def _first_fit(lengths: Lengths, order: Sequence[int], capacity: int) -> Bins:
    """Each sequence, in `order`, into the first bin with room.

    A tree holds the largest room below each node; bins that are not open yet have all
    their room, so "open a new bin" is no special case. Equal neighbours in `order` go
    into a bin together.
    """
    count = len(order)
    if count == 0:
        return []
    ordered = lengths[np.asarray(order)]
    # No two sequences above half a bin share one, so a prefix of them needs no search.
    not_large = np.flatnonzero(ordered * 2 <= capacity)
    start = int(not_large[0]) if not_large.size else count
    bins: Bins = [[index] for index in order[:start]]
    size = 1 << (count - 1).bit_length()
    tree = _tree_of_maxima(capacity - ordered[:start], capacity, size)
    values: list[int] = ordered.tolist()
    while start < count:
        length = values[start]
        node = 1
        while node < size:
            node *= 2
            if tree[node] < length:
                node += 1
        room = tree[node]
        end = start + 1
        room -= length
        while end < count and values[end] == length and room >= length:
            room -= length
            end += 1
        place = node - size
        if place == len(bins):
            bins.append([])
        bins[place].extend(order[start:end])
        start = end
        _lower(tree, node, room)
    return bins


def _tree_of_maxima(room: Lengths, capacity: int, size: int) -> list[int]:
    """Lay out a binary heap: node n is the maximum of 2n and 2n + 1, leaves last."""
    # A power of two, so that every level halves. Unopened bins have all their room.
    level = np.full(size, capacity, dtype=np.int64)
    level[: room.size] = room
    levels = [level]
    while level.size > 1:
        level = level.reshape(-1, 2).max(axis=1)
        levels.append(level)
    tree: list[int] = np.concatenate([[capacity], *reversed(levels)]).tolist()
    return tree


def _lower(tree: list[int], node: int, room: int) -> None:
    """Set a leaf to `room` and update the maxima above it."""
    tree[node] = room
    while node > 1:
        sibling = tree[node ^ 1]
        node //= 2
        largest = room if room > sibling else sibling
        # The maxima above this node do not change.
        if tree[node] == largest:
            return
        tree[node] = room = largest


_PACKERS: Mapping[PackingAlgorithm, Callable[..., SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    seed: int = 0,
) -> SequencePacker:
    """Return a packer by its `PackingAlgorithm`, or its name in any case.

    Raises:
        PackingError: There is no such algorithm, or a number is not positive.
    """
    names = [member.value for member in PackingAlgorithm]
    if isinstance(algorithm, str) and algorithm.lower() in names:
        algorithm = PackingAlgorithm(algorithm.lower())
    if not isinstance(algorithm, PackingAlgorithm):
        hint = did_you_mean(algorithm, names) if isinstance(algorithm, str) else ""
        raise PackingError(
            f"unknown packing algorithm {algorithm!r}{hint} (known: "
            f"{', '.join(names)}); give one of these names, or a PackingAlgorithm"
        )
    return _PACKERS[algorithm](
        bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, seed
    )
