"""Protocols of metrics sinks, and the registry that finds them by name.

Every sink takes numbers, texts and the configuration (`MetricSink`). What only some can
show is a protocol of its own: `HistogramSink`, `PlotSink`, `TableSink`. A sink that
does not have the method, or raises `CannotShowError`, is said to leave it out, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_distributed.errors import DistributedError
from rl_distributed.registry import Registry

if TYPE_CHECKING:
    from rl_distributed.metrics.distribution import Histogram

__all__ = [
    "CannotShowError",
    "Cell",
    "HistogramSink",
    "MetricSink",
    "PlotSink",
    "ResumableSink",
    "SinkFactory",
    "TableSink",
    "sink_registry",
]

Cell = str | int | float | bool | None
"""What a sink finds in a cell of a table; numbers are finite, texts valid UTF-8."""


class CannotShowError(DistributedError):
    """A sink has no way to show this kind of thing; it is left out there."""


@runtime_checkable
class MetricSink(Protocol):
    """Writes metrics somewhere.

    Calls come one at a time, but not always from the same thread. Steps never go back.
    A method may raise; what becomes of the sink then is the logger's to decide.
    """

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Write numbers of one step; names are complete, `time_s` is the epoch's.

        A step may come in several calls, with different metrics.
        """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration, a tree of plain values."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a piece of text that belongs to a step."""

    def flush(self) -> None:
        """Hand over to the operating system what was written so far."""

    def close(self) -> None:
        """Flush and give back files and ports; a second call does nothing."""


@runtime_checkable
class HistogramSink(Protocol):
    """A sink that can show how values are spread."""

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Write the histogram of one step."""


@runtime_checkable
class PlotSink(Protocol):
    """A sink that can show pictures."""

    def log_plot(self, name: str, figure: Any, step: int) -> None:
        """Write a matplotlib figure."""


@runtime_checkable
class TableSink(Protocol):
    """A sink that can show tables."""

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        step: int,
    ) -> None:
        """Write the table of one step; `rows` may be empty.

        Cells of one column may be of several types. Texts come from anywhere: what
        shows them as HTML or Markdown has to escape them.
        """


@runtime_checkable
class ResumableSink(Protocol):
    """A sink that outlives a run that is killed and goes on."""

    def resume_at(self, step: int) -> None:
        """Go on behind a step: of later ones, which come again, keep one value each.

        Called before anything is logged, and once more whenever the run goes back.
        """


class SinkFactory(Protocol):
    """A registered factory, usually the class of the sink.

    With a `Config` class as its attribute `config_class` it is called as
    `factory(log_dir, config)`, and its settings are checked by that class; without,
    as `factory(log_dir, **settings)`.
    """

    def __call__(self, log_dir: Path, *args: Any, **settings: Any) -> MetricSink:
        """Make a sink that may write below `log_dir`."""


sink_registry: Registry[SinkFactory] = Registry("rl.loggers", "metrics sink")
"""Sinks by name; other packages add theirs to the entry-point group `rl.loggers`."""
