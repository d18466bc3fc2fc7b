"""Pack sequences of different lengths into bins of a fixed token capacity.

All algorithms take O(n log n): a tree of maxima finds the first bin with room, and a
union-find over the distinct lengths finds the longest sequence that still fits.
"""

from __future__ import annotations

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
from rl_distributed.batch.first_fit import first_fit
from rl_distributed.batch.modified_first_fit import modified_first_fit_decreasing
from rl_distributed.batch.size_checks import require_positive
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
    """Share of the bins' total capacity that stays empty."""
    load_imbalance: float
    """How far the fullest bin exceeds the mean; 0.0 is perfect balance."""


class SequencePacker(ABC):
    """Packs sequences into bins; `get_packer` returns one.

    Args:
        bin_capacity: Maximum number of tokens in a bin.
        collect_metrics: Whether `pack` keeps the metrics of its last call in `metrics`.
        min_bin_count: Minimum number of bins; None: 1.
        bin_count_multiple: Number that the number of bins is a multiple of; None: 1.
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
        self.min_bin_count = 1 if min_bin_count is None else min_bin_count
        self.bin_count_multiple = (
            1 if bin_count_multiple is None else bin_count_multiple
        )
        require_positive("bin_capacity", bin_capacity, PackingError)
        require_positive("min_bin_count", self.min_bin_count, PackingError)
        require_positive("bin_count_multiple", self.bin_count_multiple, PackingError)
        self.bin_capacity = int(bin_capacity)
        self.collect_metrics = collect_metrics
        self.seed = seed
        self.metrics: PackingMetrics | None = None

    def pack(self, sequence_lengths: ArrayLike) -> Bins:
        """Return the indices of the sequences in each bin; each is in exactly one.

        Where `min_bin_count` or `bin_count_multiple` asks for more bins than the
        sequences need, they are spread evenly over all bins if they fit that way;
        otherwise the fullest bins are split.

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
        """Return waste and imbalance of `bins`."""
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
        """Return bins for valid lengths, as many as it takes."""

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
        """Spread the same sequences over more bins, evenly where that is possible."""
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
        return first_fit(lengths, order, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """`PackingAlgorithm.FIRST_FIT_SHUFFLE`."""

    def _pack(self, lengths: Lengths) -> Bins:
        order = np.random.default_rng(self.seed).permutation(lengths.size).tolist()
        return first_fit(lengths, order, self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """`PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING`."""

    def _pack(self, lengths: Lengths) -> Bins:
        return modified_first_fit_decreasing(lengths, self.bin_capacity)


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
