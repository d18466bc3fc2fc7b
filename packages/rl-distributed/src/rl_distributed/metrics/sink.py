"""What a metrics sink is, and the registry that finds it by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rl_distributed.registry import Registry

__all__ = ["MetricSink", "SinkFactory", "sink_registry"]


@runtime_checkable
class MetricSink(Protocol):
    """Writes metrics somewhere. All calls come from one thread."""

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Write numbers of one step; names are complete, `time_s` is the epoch's."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration, a tree of plain values."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a piece of text that belongs to a step."""

    def flush(self) -> None:
        """Hand over to the operating system what was written so far."""

    def close(self) -> None:
        """Flush and give back files; no call comes afterwards."""


class SinkFactory(Protocol):
    """What is registered: usually the class of the sink."""

    def __call__(self, log_dir: Path, **settings: Any) -> MetricSink:
        """Make a sink that may write below `log_dir`."""


sink_registry: Registry[SinkFactory] = Registry("rl.loggers", "metrics sink")
"""Sinks by name; other packages add theirs to the entry-point group `rl.loggers`."""
