"""The metrics of a stage as columns, from a file that may still be written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.history import metric_name
from rl_distributed.metrics.sinks.jsonl import read_records

__all__ = ["MetricTable", "Points", "thinned"]

Points = tuple[list[int], list[float]]
"""Steps in their order, and the value at each of them."""


@dataclass
class MetricTable:
    """All metrics of one stage by name, each with its steps."""

    columns: dict[str, dict[int, float]] = field(default_factory=dict)
    """Values by step, by name of the metric; only finite ones."""
    times: dict[int, float] = field(default_factory=dict)
    """When a step was logged last, in seconds since the epoch."""
    num_nonfinite: dict[str, int] = field(default_factory=dict)
    """How often a metric was NaN or infinite."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration of the newest start; {} where no sink wrote it."""
    num_starts: int = 0
    """How often a process began the stage or went on with it."""

    @classmethod
    def read(cls, path: Path) -> MetricTable:
        """Read the file of the JSONL sink; of a step done again the last value counts.

        Args:
            path: The file; a missing one gives an empty table.
        """
        table = cls()
        if path.is_file():
            for record in read_records(path):
                table.add(record)
        return table

    def add(self, record: Mapping[str, Any]) -> None:
        """Add what a line of the file holds; of an odd one what can be read.

        Args:
            record: The line, parsed.
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
            number = float(value)  # a text where it is not finite
        except (TypeError, ValueError):
            return
        if math.isfinite(number):
            self.columns.setdefault(name, {})[step] = number
        else:
            self.num_nonfinite[name] = self.num_nonfinite.get(name, 0) + 1

    @property
    def last_step(self) -> int:
        """The newest step that has metrics; 0 where none has."""
        return max(self.times, default=0)

    def points(self, name: str) -> Points:
        """Return the steps of a metric in their order, and its values."""
        column = self.columns.get(name, {})
        steps = sorted(column)
        return steps, [column[step] for step in steps]

    def total(self, name: str) -> float | None:
        """Return the sum of a metric over all steps; None where it was not logged."""
        column = self.columns.get(name)
        return None if column is None else math.fsum(column.values())


def thinned(points: Points, limit: int) -> Points:
    """Return at most `limit` points with the same outline.

    The points fall into buckets of equal number; of each the lowest and the highest
    one stay, so that a spike of one step is still seen. First and last point stay.

    Args:
        points: Steps and values.
        limit: At least 4.
    """
    steps, values = points
    if len(steps) <= limit:
        return points
    kept = sorted({0, len(steps) - 1, *_extremes(values, (limit - 2) // 2)})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _extremes(values: list[float], num_buckets: int) -> Iterator[int]:
    """Yield the places of the lowest and the highest value of each bucket."""
    for bucket in range(num_buckets):
        start = bucket * len(values) // num_buckets
        end = (bucket + 1) * len(values) // num_buckets
        yield min(range(start, end), key=values.__getitem__)
        yield max(range(start, end), key=values.__getitem__)
