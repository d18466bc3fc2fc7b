"""Metric values that know how they reduce over micro-batches, ranks and steps.

A value is a small frozen object with `merge` (associative and, but for `Last`,
commutative) and `float()`. So a mean over ranks with different counts is exact, and
nobody has to guess from a metric's name whether to add or to average.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rl_distributed.errors import UserError

__all__ = [
    "Last",
    "Max",
    "Mean",
    "Metric",
    "MetricError",
    "MetricValue",
    "Min",
    "Sum",
    "as_metric",
    "exact_sum",
    "reduce_metrics",
    "to_floats",
]

MetricT = TypeVar("MetricT", bound="MetricValue")


class MetricError(UserError, ValueError):
    """A metric is not a number, or two values of one metric reduce differently."""


class MetricValue(ABC):
    """A number together with the way it reduces."""

    __slots__ = ()

    @abstractmethod
    def merge(self: MetricT, other: MetricT) -> MetricT:
        """Return the value of both observations together; `other` is the later one."""

    @abstractmethod
    def __float__(self) -> float: ...

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed, so that there is no number to show."""
        return False

    def to_numbers(self, name: str) -> dict[str, float]:
        """Return what sinks show of it; most are one number of this name."""
        return {name: float(self)}


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once, so that it does not depend on the order.

    Infinite where the numbers exceed what a float holds, and NaN where they hold
    infinities of both signs.
    """
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        # `fsum` raises, where addition gives what a diverged run has to show.
        return float(sum(numbers))


def _check_number(owner: object, value: object) -> None:
    # bool is a subclass of int, and arrays would silently merge element-wise.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetricError(
            f"{type(owner).__name__} takes a plain number: got "
            f"{type(value).__name__}; convert it with float(...)"
        )


@dataclass(frozen=True, slots=True)
class Mean(MetricValue):
    """A weighted mean: `total / count`."""

    total: float
    """Sum of the observations, each times its weight."""
    count: float = 1.0
    """Sum of the weights; 0 where nothing was observed."""

    def __post_init__(self) -> None:
        _check_number(self, self.total)
        _check_number(self, self.count)
        if self.count < 0:
            raise MetricError(f"Mean.count cannot be negative: got {self.count!r}")

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Return the mean of plain numbers, each of weight one."""
        numbers = [float(value) for value in values]
        return cls(exact_sum(numbers), float(len(numbers)))

    def merge(self, other: Mean) -> Mean:
        """Add totals and counts."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def is_empty(self) -> bool:
        """Whether no weight was observed."""
        return self.count == 0

    @property
    def value(self) -> float:
        """The mean; NaN where nothing was observed."""
        return self.total / self.count if self.count else math.nan

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class _Single(MetricValue):
    """Base of the values that are one number."""

    value: float

    def __post_init__(self) -> None:
        _check_number(self, self.value)

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Sum(_Single):
    """Observations add up: token counts, losses that are normalised already."""

    def merge(self, other: Sum) -> Sum:
        """Add."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Min(_Single):
    """The smallest observation counts; NaN wins over every number."""

    def merge(self, other: Min) -> Min:
        """Take the smaller one."""
        # `min` and `max` keep or drop a NaN depending on its position,
        # but it must be seen.
        if math.isnan(self.value) or math.isnan(other.value):
            return Min(math.nan)
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Max(_Single):
    """The largest observation counts; NaN wins over every number."""

    def merge(self, other: Max) -> Max:
        """Take the larger one."""
        if math.isnan(self.value) or math.isnan(other.value):
            return Max(math.nan)
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last(_Single):
    """The newest observation counts: a learning rate, a version."""

    def merge(self, other: Last) -> Last:
        """Take the later one."""
        return other


Metric: TypeAlias = float | MetricValue
"""Accepted forms of a metric: a number or a typed value."""


def as_metric(
    value: Any, *, name: str = "metric", plain: type[Mean] | type[_Single] = Mean
) -> MetricValue:
    """Make a typed value of a number.

    Args:
        value: A typed value (returned as it is), a number, or an array or tensor of one
            element.
        name: The metric's name, for the message.
        plain: How numbers without a type reduce.

    Raises:
        MetricError: The value is no number.
    """
    if isinstance(value, MetricValue):
        return value
    number: Any = value
    # Covers numpy and torch without importing either.
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        num_elements = value.numel() if hasattr(value, "numel") else value.size
        if num_elements != 1:
            raise MetricError(
                f"metric {name!r} must be one number: got an array of "
                f"{num_elements}; reduce it first, or log a Mean(total, count)"
            )
        number = value.item()
    if isinstance(number, bool):
        # Flags count as 0 or 1, so their mean is a share.
        number = float(number)
    if not isinstance(number, (int, float)):
        raise MetricError(
            f"metric {name!r} must be a number or one of Mean, Sum, Min, Max, Last: "
            f"got {type(value).__name__} {value!r:.80}"
        )
    return plain(float(number))


def reduce_metrics(
    metrics: Sequence[Mapping[str, Any]],
    *,
    plain: type[Mean] | type[_Single] = Mean,
) -> dict[str, MetricValue]:
    """Reduce the metrics of several micro-batches, ranks or steps by name.

    A name that some of them lack reduces over those that have it. The result is typed,
    so reducing in stages gives the same numbers as reducing at once.

    Args:
        metrics: One mapping per observation, oldest first.
        plain: How numbers without a type reduce.

    Raises:
        MetricError: A value is no number, or one name has values of two types.
    """
    reduced: dict[str, MetricValue] = {}
    for observation in metrics:
        for name, raw in observation.items():
            value = as_metric(raw, name=name, plain=plain)
            before = reduced.get(name)
            if before is None:
                reduced[name] = value
            elif type(before) is not type(value):
                raise MetricError(
                    f"metric {name!r} is a {type(before).__name__} in one observation "
                    f"and a {type(value).__name__} in another; use one type"
                )
            else:
                reduced[name] = before.merge(value)
    return reduced


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return plain numbers; values without an observation are left out.

    A `Distribution` becomes several numbers, named below its own name.

    Raises:
        MetricError: A value is no number.
    """
    numbers: dict[str, float] = {}
    for name, raw in metrics.items():
        value = as_metric(raw, name=name)
        # Left out rather than shown as NaN, which would look like a failure.
        if not value.is_empty:
            numbers.update(value.to_numbers(name))
    return numbers
