"""The metrics of a stage as columns, from a file that may still grow."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.history import metric_name
from rl_distributed.metrics.sinks.jsonl import read_records

__all__ = ["MetricTable", "Points", "StepValues", "thinned"]

Points = tuple[list[int], list[float]]
"""Steps in order, and the value at each."""


class StepValues(Mapping[int, float]):
    """Values by step, in order of the steps.

    A value takes 16 bytes, a fifth of what a dict takes: a page that follows a run
    holds all metrics of all its steps.
    """

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def __setitem__(self, step: int, value: float) -> None:
        if not self._steps or step > self._steps[-1]:
            self._steps.append(step)
            self._values.append(value)
            return
        # A step that a resumed run has repeated.
        place = bisect_left(self._steps, step)
        if self._steps[place] == step:
            self._values[place] = value
        else:
            self._steps.insert(place, step)
            self._values.insert(place, value)

    def __getitem__(self, step: int) -> float:
        place = bisect_left(self._steps, step)
        if place == len(self._steps) or self._steps[place] != step:
            raise KeyError(step)
        return self._values[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    # Those of Mapping would search for each step.
    def values(self) -> ValuesView[float]:
        """Return the values in order of their steps."""
        return _ValuesInOrder(self)

    def items(self) -> ItemsView[int, float]:
        """Return the steps with their values."""
        return _ItemsInOrder(self)


class _ValuesInOrder(ValuesView[float]):
    _mapping: StepValues

    def __iter__(self) -> Iterator[float]:
        return iter(self._mapping._values)


class _ItemsInOrder(ItemsView[int, float]):
    _mapping: StepValues

    def __iter__(self) -> Iterator[tuple[int, float]]:
        found = self._mapping
        return zip(found._steps, found._values, strict=True)


@dataclass
class MetricTable:
    """All metrics of a stage by name and step."""

    columns: dict[str, StepValues] = field(default_factory=dict)
    """Finite values by step, by name of the metric."""
    times: dict[int, float] = field(default_factory=dict)
    """Time at which each step was last logged, in seconds since the epoch."""
    num_nonfinite: dict[str, int] = field(default_factory=dict)
    """Number of NaN or infinite values by metric."""
    nonfinite: dict[str, dict[int, float]] = field(default_factory=dict)
    """Those values by step, by name of the metric."""
    config: dict[str, Any] = field(default_factory=dict)
    """Resolved configuration of the latest start; {} if no sink wrote it."""
    num_starts: int = 0
    """Number of times that a process started or resumed the stage."""

    @classmethod
    def read(cls, path: Path) -> MetricTable:
        """Read the file of the JSONL sink; of repeated steps, the last value counts.

        Args:
            path: The file; if it is missing, the table is empty.
        """
        table = cls()
        if path.is_file():
            for record in read_records(path):
                table.add(record)
        return table

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the contents of a line, ignoring malformed parts.

        Args:
            record: The parsed line.
        """
        config, metrics = record.get("hyperparams"), record.get("metrics")
        if isinstance(config, dict):
            self.config = config
            self.num_starts += 1
        step = record.get("step")
        if not isinstance(metrics, dict) or not isinstance(step, int):
            return
        if isinstance(time_s := record.get("time"), float):
            self.times[step] = time_s
        for written, value in metrics.items():
            self._put(metric_name(written) or written, step, value)

    def _put(self, name: str, step: int, value: Any) -> None:
        try:
            # Non-finite values are stored as texts, since JSON has none.
            number = float(value)
        except (TypeError, ValueError):
            return
        if math.isfinite(number):
            self.columns.setdefault(name, StepValues())[step] = number
            self.nonfinite.get(name, {}).pop(step, None)
        else:
            self.nonfinite.setdefault(name, {})[step] = number
            self.num_nonfinite[name] = self.num_nonfinite.get(name, 0) + 1

    @property
    def last_step(self) -> int:
        """Latest step with metrics; 0 if there is none."""
        return max(self.times, default=0)

    def value(self, name: str, step: int) -> float | None:
        """Return the latest value of a metric in a step, finite or not, or None."""
        found = self.nonfinite.get(name, {}).get(step)
        column: Mapping[int, float] = self.columns.get(name, {})
        return column.get(step) if found is None else found

    def points(self, name: str) -> Points:
        """Return the steps of a metric in order, and its values."""
        column = self.columns.get(name, StepValues())
        return list(column), list(column.values())

    def total(self, name: str) -> float | None:
        """Return the sum of a metric over all steps; None if it was not logged."""
        column = self.columns.get(name)
        # fsum: a plain sum over many steps loses digits.
        return None if column is None else math.fsum(column.values())


def thinned(points: Points, limit: int) -> Points:
    """Return at most `limit` points with the same outline.

    Points are divided into equal buckets, of which the lowest and the highest are kept,
    so that even a spike of a single step remains visible. The first and the last point
    are kept, too.

    Args:
        points: Steps and values.
        limit: Maximum number of points, at least 4.
    """
    steps, values = points
    if len(steps) <= limit:
        return points
    kept = sorted({0, len(steps) - 1, *_extremes(values, (limit - 2) // 2)})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _extremes(values: list[float], num_buckets: int) -> Iterator[int]:
    """Yield the indices of the lowest and the highest value of each bucket."""
    for bucket in range(num_buckets):
        start = bucket * len(values) // num_buckets
        end = (bucket + 1) * len(values) // num_buckets
        yield min(range(start, end), key=values.__getitem__)
        yield max(range(start, end), key=values.__getitem__)
