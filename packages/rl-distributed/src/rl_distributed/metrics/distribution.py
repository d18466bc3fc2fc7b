"""Histograms, and a metric value that keeps the shape of many observations.

`Distribution` counts observations in buckets whose width grows with the value, so that
every percentile is within 1 % of the true one, whatever the range, and two of them add
up exactly: percentiles over micro-batches, ranks and steps come out the same as over
all observations at once, which no average of percentiles does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_distributed.metrics.values import MetricError, MetricValue, exact_sum

__all__ = ["Distribution", "Histogram"]

_ACCURACY = 0.01
_GAMMA = (1 + _ACCURACY) / (1 - _ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
_PERCENTILES = (50, 90, 99)

Values = Iterable[float]
Floats = npt.NDArray[np.float64]


def _flat(values: Any) -> Floats:
    """Return numbers of any nesting, array or tensor as one flat array."""
    if callable(getattr(values, "detach", None)):
        # Of a tensor; numpy knows no bfloat16.
        values = values.detach().double().cpu()
    if not hasattr(values, "__array__"):
        values = list(values)
    try:
        return np.asarray(values, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise MetricError(f"a histogram takes numbers only: {error}") from error


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges."""

    edges: tuple[float, ...]
    """[bins + 1] rising borders of the bins."""
    counts: tuple[float, ...]
    """[bins] observations in each; the last bin includes its upper border."""
    total: float = 0.0
    """Sum of the observations."""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise MetricError(
                "Histogram.edges must be one more than its counts, of which there is "
                f"at least one: got {len(self.edges)} edges, {len(self.counts)} counts"
            )
        if any(not a < b for a, b in itertools.pairwise(self.edges)):
            raise MetricError("Histogram.edges must rise")

    @classmethod
    def of(cls, values: Any, num_bins: int = 64) -> Histogram:
        """Count observations in bins of one width; infinities and NaN are left out.

        Args:
            values: Numbers: an iterable, an array or a tensor of any shape.
            num_bins: Number of bins.

        Raises:
            MetricError: Something is no number, or none of them is finite.
        """
        flat = _flat(values)
        finite = flat[np.isfinite(flat)]
        if not finite.size:
            raise MetricError(
                f"a histogram needs a finite number: got none among {flat.size}"
            )
        low, high = float(finite.min()), float(finite.max())
        return cls(*_binned(finite, num_bins, low, high), exact_sum(finite.tolist()))


@dataclass(frozen=True, slots=True)
class Distribution(MetricValue):
    """Observations by their size, for percentiles and histograms.

    In `log_metrics` one of them becomes several numbers: `name/mean`, `name/min`,
    `name/p50`, `name/p90`, `name/p99`, `name/max`, and `name/num_nonfinite` if any
    observation was infinite or NaN, which the others leave out.
    """

    buckets: Mapping[int, int] = field(default_factory=dict)
    """Observations above zero, by the bucket of their logarithm."""
    negative_buckets: Mapping[int, int] = field(default_factory=dict)
    """Observations below zero, by the bucket of their size."""
    num_zeros: int = 0
    """Observations that are zero."""
    num_nonfinite: int = 0
    """Observations that are infinite or NaN."""
    total: float = 0.0
    """Sum of the finite observations."""
    smallest: float = math.inf
    """The smallest finite observation; infinite where there is none."""
    largest: float = -math.inf
    """The largest finite observation."""

    @classmethod
    def of(cls, values: Any) -> Distribution:
        """Take numbers: an iterable, an array or a tensor of any shape.

        Raises:
            MetricError: Something is no number.
        """
        flat = _flat(values)
        finite = flat[np.isfinite(flat)]
        if not finite.size:
            return cls(num_nonfinite=int(flat.size))
        return cls(
            _count(finite[finite > 0]),
            _count(-finite[finite < 0]),
            int((finite == 0).sum()),
            int(flat.size - finite.size),
            exact_sum(finite.tolist()),
            float(finite.min()),
            float(finite.max()),
        )

    @property
    def count(self) -> int:
        """Number of finite observations."""
        return (
            sum(self.buckets.values())
            + sum(self.negative_buckets.values())
            + self.num_zeros
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return not self.count and not self.num_nonfinite

    def merge(self, other: Distribution) -> Distribution:
        """Add up all counts."""
        return Distribution(
            dict(Counter(self.buckets) + Counter(other.buckets)),
            dict(Counter(self.negative_buckets) + Counter(other.negative_buckets)),
            self.num_zeros + other.num_zeros,
            self.num_nonfinite + other.num_nonfinite,
            self.total + other.total,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )

    def __float__(self) -> float:
        """Return the mean; NaN where nothing finite was observed."""
        count = self.count
        return self.total / count if count else math.nan

    def percentile(self, percent: float) -> float:
        """Return the value that this share of the observations does not exceed.

        Args:
            percent: From 0 to 100.

        Returns:
            It, within 1 %; NaN where nothing finite was observed.

        Raises:
            MetricError: The share is out of range.
        """
        if not 0 <= percent <= 100:
            raise MetricError(f"percentile must be from 0 to 100: got {percent!r}")
        count = self.count
        if not count:
            return math.nan
        # At least one, so that percentile 0 is the smallest observation.
        wanted = max(1, math.ceil(count * percent / 100))
        seen = 0
        for value, number in self.points():
            seen += number
            if seen >= wanted:
                # The middle of an outer bucket may lie outside the observed range.
                return min(max(value, self.smallest), self.largest)
        return self.largest

    def histogram(self, num_bins: int = 64) -> Histogram:
        """Return counts in bins of one width, each observation within 1 % of its place.

        Raises:
            MetricError: Nothing finite was observed.
        """
        if not self.count:
            raise MetricError("a histogram needs a finite number: got none")
        values, numbers = zip(*self.points(), strict=True)
        # A bucket's middle may lie outside the range, where numpy would drop it.
        placed = np.clip(values, self.smallest, self.largest)
        binned = _binned(placed, num_bins, self.smallest, self.largest, numbers)
        return Histogram(*binned, self.total)

    def to_numbers(self, name: str) -> dict[str, float]:
        """Return mean, extremes and percentiles below the name."""
        numbers = {f"{name}/mean": float(self)}
        if self.count:
            numbers |= {f"{name}/min": self.smallest, f"{name}/max": self.largest}
            numbers |= {f"{name}/p{p}": self.percentile(p) for p in _PERCENTILES}
        if self.num_nonfinite:
            numbers[f"{name}/num_nonfinite"] = float(self.num_nonfinite)
        return numbers

    def points(self) -> list[tuple[float, int]]:
        """Return (value, number) of every bucket, smallest value first.

        The value is within 1 % of each observation in the bucket.
        """
        # Buckets are by magnitude, so the largest bucket holds the smallest numbers.
        below = sorted(self.negative_buckets.items(), reverse=True)
        pairs = [(-_middle(index), number) for index, number in below]
        if self.num_zeros:
            pairs.append((0.0, self.num_zeros))
        above = sorted(self.buckets.items())
        return pairs + [(_middle(index), number) for index, number in above]


def _binned(
    values: Floats,
    num_bins: int,
    low: float,
    high: float,
    weights: npt.ArrayLike | None = None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the edges of bins of one width from `low` to `high`, and their counts.

    Values that are too close together for so many edges get bins that reach further.
    """
    # Halved, because the distance of the largest floats is none.
    scale = 1.0 if math.isfinite(high - low) else 2.0
    low, high = low / scale, high / scale
    if low == high:
        low, high = low - 0.5, high + 0.5
    # Two steps of the largest float for each bin, so that no two edges are the same.
    least = 2 * num_bins * math.ulp(max(-low, high))
    if high - low < least:
        # Towards zero, as there may be no float beyond.
        low, high = (low, low + least) if -low > high else (high - least, high)
    counts, edges = np.histogram(
        values / scale, bins=num_bins, range=(low, high), weights=weights
    )
    return tuple((edges * scale).tolist()), tuple(map(float, counts))


def _count(sizes: Floats) -> dict[int, int]:
    indices = np.ceil(np.log(sizes) / _LOG_GAMMA).astype(np.int64)
    found, numbers = np.unique(indices, return_counts=True)
    return dict(zip(found.tolist(), numbers.tolist(), strict=True))


def _middle(index: int) -> float:
    """Return the value that is within 1 % of everything in a bucket."""
    # By its logarithm: the power alone overflows for the largest floats.
    return math.exp(min(index * _LOG_GAMMA, 709.7)) * 2 / (_GAMMA + 1)
