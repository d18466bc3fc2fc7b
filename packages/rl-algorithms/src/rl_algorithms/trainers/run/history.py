"""The history of a run's metrics, in memory and from its file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_distributed.errors import RegistryError
from rl_distributed.metrics.sinks.jsonl import read_metrics

__all__ = ["History", "metric_name", "optional_module"]

_PREFIXES = {
    "train": "train",
    "val": "validation",
    "performance": "performance",
    "timing": "timing/train",
}
"""Prefixes of names, and their form in files of earlier versions: `train/loss`."""


def metric_name(written: str) -> str | None:
    """Return the current name of a metric in a file, or None for other metrics."""
    prefix, colon, rest = written.partition(":")
    if colon and rest and prefix in _PREFIXES:
        return written
    for prefix, path in _PREFIXES.items():
        if written.startswith(f"{path}/"):
            return f"{prefix}:{written[len(path) + 1 :]}"
    return None


class History(list[dict[str, float]]):
    """One record per step: `{"step": 3, "train:loss": 0.5, "val:accuracy": 0.7, ...}`.

    It is a plain list; `to_pandas` converts it to a data frame.
    """

    def __repr__(self) -> str:
        names = {name for record in self for name in record if name != "step"}
        return f"History({len(self)} records, {len(names)} metrics)"

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the record of a step, which is created if necessary."""
        if not self or self[-1]["step"] != step:
            self.append({"step": step})
        self[-1].update(metrics)

    def at(self, step: int) -> dict[str, float]:
        """Return the metrics of a step, or {} if it has none."""
        # From the end: callers ask about the latest steps, and records are ordered.
        for record in reversed(self):
            if record["step"] <= step:
                found = record if record["step"] == step else {}
                return {name: v for name, v in found.items() if name != "step"}
        return {}

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric, and its values."""
        found = [record for record in self if name in record]
        return [int(r["step"]) for r in found], [r[name] for r in found]

    def to_pandas(self) -> Any:
        """Return a pandas data frame: a row per step (its index), a column per metric.

        Metrics that a step lacks are NaN.

        Raises:
            RegistryError: pandas is not installed.
        """
        pandas = optional_module("pandas")
        if not self:
            return pandas.DataFrame(index=pandas.Index([], name="step"))
        return pandas.DataFrame(list(self)).set_index("step")

    @property
    def frame(self) -> Any:
        """The same as `to_pandas()`."""
        return self.to_pandas()

    @classmethod
    def read(cls, path: Path, *, up_to: int) -> History:
        """Read the file of the JSONL sink up to a step; of repeated steps, the last.

        Args:
            path: The file; if it is missing, the history is empty.
            up_to: Last step to read.
        """
        history = cls()
        if not path.is_file():
            return history
        records: dict[int, dict[str, float]] = {}
        for step, metrics in read_metrics(path):
            named = {n: v for key, v in metrics.items() if (n := metric_name(key))}
            # The file also has samples of the machine's load, which belong to no step.
            if named and step <= up_to:
                # A step may have several lines, and be repeated after the run went
                # back.
                records.setdefault(step, {"step": step}).update(named)
        # Sorted: a repeated step may come after later ones in the file.
        history.extend(records[step] for step in sorted(records))
        return history


def optional_module(module: str) -> Any:
    """Import a module of the extra `plot`.

    Raises:
        RegistryError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise RegistryError(
            f"{name} is not installed; `pip install 'rl-algorithms[plot]'`"
        ) from None
