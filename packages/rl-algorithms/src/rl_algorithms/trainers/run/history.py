"""The history of a run's metrics, in memory and from its file."""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

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


@dataclass(frozen=True, slots=True)
class _Record:
    """Metrics of a step, without an object per value."""

    step: int
    names: tuple[str, ...]
    """Names of the metrics, one tuple for all steps that have the same ones."""
    values: array[float]

    def to_dict(self) -> dict[str, float]:
        pairs = zip(self.names, self.values, strict=True)
        return {"step": self.step, **dict(pairs)}


class History(Sequence[dict[str, float]]):
    """One record per step: `{"step": 3, "train:loss": 0.5, "val:accuracy": 0.7, ...}`.

    It is read like a list; `to_pandas` converts it to a data frame. A value takes 8
    bytes, since a run keeps those of all its steps; changes of a record that was
    returned do not reach it.

    Args:
        records: Records in the order of their steps.
    """

    def __init__(self, records: Iterable[Mapping[str, float]] = ()) -> None:
        self._records: list[_Record] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        for record in records:
            self._append(record)

    def __repr__(self) -> str:
        return f"History({len(self)} records, {len(self.names)} metrics)"

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> dict[str, float] | list[dict[str, float]]:
        if isinstance(index, slice):
            return [record.to_dict() for record in self._records[index]]
        return self._records[index].to_dict()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History | list):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> set[str]:
        """Names of all metrics."""
        return {name for names in self._names for name in names}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the record of a step, which is created if necessary."""
        earlier: Mapping[str, float] = {}
        if self._records and self._records[-1].step == step:
            earlier = self._records.pop().to_dict()
        self._append({**earlier, **metrics, "step": step})

    def _append(self, record: Mapping[str, float]) -> None:
        named = {name: value for name, value in record.items() if name != "step"}
        # The names of a step are new strings each time.
        names = tuple(map(sys.intern, named))
        names = self._names.setdefault(names, names)
        values = array("d", named.values())
        self._records.append(_Record(int(record["step"]), names, values))

    def at(self, step: int) -> dict[str, float]:
        """Return the metrics of a step, or {} if it has none."""
        # From the end: callers ask about the latest steps, and records are ordered.
        for record in reversed(self._records):
            if record.step <= step:
                found = record.to_dict() if record.step == step else {}
                return {name: v for name, v in found.items() if name != "step"}
        return {}

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric, and its values."""
        places = {
            names: names.index(name) for names in self._names.values() if name in names
        }
        found = [record for record in self._records if record.names in places]
        steps = [record.step for record in found]
        return steps, [record.values[places[record.names]] for record in found]

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
        if not path.is_file():
            return cls()
        records: dict[int, dict[str, float]] = {}
        for step, metrics in read_metrics(path):
            named = {n: v for key, v in metrics.items() if (n := metric_name(key))}
            # The file also has samples of the machine's load, which belong to no step.
            if named and step <= up_to:
                # A step may have several lines, and be repeated after the run went
                # back.
                records.setdefault(step, {"step": step}).update(named)
        # Sorted: a repeated step may come after later ones in the file.
        return cls(records[step] for step in sorted(records))


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
