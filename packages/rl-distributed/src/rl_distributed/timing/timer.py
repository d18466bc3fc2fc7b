"""Named spans of time, and the decision when the last checkpoint is due."""

from __future__ import annotations

import math
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import current_log_context
from rl_distributed.timing.tracing import Span, export_chrome_trace

__all__ = ["Marker", "TimeoutChecker", "Timer", "convert_to_seconds"]


def _standard_deviation(values: list[float]) -> float:
    return statistics.pstdev(values)


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "std": _standard_deviation,
    "sum": math.fsum,
    "count": lambda values: float(len(values)),
}


def _reduction(op: str) -> Callable[[list[float]], float]:
    try:
        return _REDUCTIONS[op]
    except KeyError:
        raise ValueError(
            f"timer: unknown reduction {op!r}; use one of {', '.join(_REDUCTIONS)}"
        ) from None


# The newest spans that a timer keeps for a trace, some 20 MB.
_MOST_SPANS = 100_000


@dataclass(frozen=True, slots=True)
class _Opened:
    """A span that runs."""

    clock_s: float
    thread_id: int
    thread_name: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment on the timeline of a timer."""

    label: str
    """What happened."""
    time_s: float
    """Seconds since the epoch, so that timelines of several hosts can be laid over."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything that tells this moment from others of the same label."""


class Timer:
    """Measures named spans and reduces them to metrics.

    A label may be measured many times; labels with a slash group in the sinks
    (`step/forward`). All methods may be called from any thread; a span that is open
    under one label is one span, whichever thread opened it. `export_chrome_trace`
    shows them on a timeline, those of other processes included.

    Args:
        context: Fields that every marker carries, such as the name of a worker.
        clock: Seconds from any fixed moment on; never goes back.
    """

    def __init__(
        self,
        context: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context = dict(context or {})
        self._clock = clock
        # Spans are opened and closed in any thread.
        self._lock = threading.Lock()
        self._running: dict[str, _Opened] = {}
        self._spans: deque[tuple[str, _Opened, float]] = deque(maxlen=_MOST_SPANS)
        # Between the clock and the wall clock, by which traces are merged.
        self._epoch_ns = time.time_ns() - round(clock() * 1e9)
        self._elapsed: dict[str, list[float]] = {}
        self._markers: list[Marker] = []

    def start(self, label: str) -> None:
        """Open a span.

        Raises:
            ValueError: A span of this label is open already.
        """
        with self._lock:
            if label in self._running:
                raise ValueError(f"timer: {label!r} is running already; stop it first")
            thread = threading.current_thread()
            self._running[label] = _Opened(
                self._clock(), threading.get_native_id(), thread.name
            )

    def stop(self, label: str) -> float:
        """Close a span and return its seconds.

        Raises:
            ValueError: No span of this label is open.
        """
        # Read before waiting for the lock, so that the wait does not count.
        now = self._clock()
        with self._lock:
            if label not in self._running:
                running = ", ".join(sorted(self._running)) or "none"
                raise ValueError(
                    f"timer: {label!r} is not running (running: {running}); "
                    "start it first"
                )
            opened = self._running.pop(label)
            elapsed = now - opened.clock_s
            self._spans.append((label, opened, now))
            self._elapsed.setdefault(label, []).append(elapsed)
        return elapsed

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measure a block; the span is closed when the block raises, too."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def record(self, label: str, elapsed: float) -> None:
        """Add a span that something else measured.

        Raises:
            ValueError: The duration is negative or not a number.
        """
        if not elapsed >= 0:
            raise ValueError(f"timer: {label!r} cannot have taken {elapsed!r} seconds")
        with self._lock:
            self._elapsed.setdefault(label, []).append(float(elapsed))

    def mark(self, label: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Note that something happened now."""
        marker = Marker(label, time.time(), {**self._context, **(metadata or {})})
        with self._lock:
            self._markers.append(marker)

    def get_markers(self) -> list[Marker]:
        """Return the moments noted so far, oldest first."""
        with self._lock:
            return list(self._markers)

    def get_spans(self) -> list[Span]:
        """Return closed spans and markers for a trace, as records that can be pickled.

        The newest 100,000 spans since the last `reset` are there. What `record` added
        has no place on the timeline and is left out.
        """
        with self._lock:
            spans, markers = list(self._spans), list(self._markers)
        who = _who_this_is()
        found = [
            Span(
                label,
                self._to_epoch_ns(opened.clock_s),
                self._to_epoch_ns(end_s) - self._to_epoch_ns(opened.clock_s),
                thread_id=opened.thread_id,
                thread_name=opened.thread_name,
                metadata=self._context,
                **who,
            )
            for label, opened, end_s in spans
        ]
        found += [
            Span(
                marker.label,
                round(marker.time_s * 1e9),
                None,
                thread_name="markers",
                metadata=marker.metadata,
                **who,
            )
            for marker in markers
        ]
        return found

    def export_chrome_trace(
        self, path: str | os.PathLike[str], others: Iterable[Span] = ()
    ) -> Path:
        """Write the spans to a file that `chrome://tracing` and Perfetto open.

        Args:
            path: The file; it is replaced as a whole.
            others: Spans of other timers, such as those of workers.

        Returns:
            The path of the file.

        Raises:
            OSError: It cannot be written.
        """
        return export_chrome_trace(path, [*self.get_spans(), *others])

    def _to_epoch_ns(self, clock_s: float) -> int:
        return round(clock_s * 1e9) + self._epoch_ns

    def get_elapsed(self, label: str) -> list[float]:
        """Return the seconds of every closed span of a label.

        Raises:
            KeyError: The label was never measured.
        """
        with self._lock:
            if label not in self._elapsed:
                known = ", ".join(sorted(self._elapsed)) or "none"
                raise KeyError(f"timer: {label!r} was never measured; labels: {known}")
            return list(self._elapsed[label])

    def get_latest_elapsed(self, label: str) -> float:
        """Return the seconds of the newest closed span of a label.

        Raises:
            KeyError: The label was never measured.
        """
        return self.get_elapsed(label)[-1]

    def reduce(self, label: str, operation: str = "mean") -> float:
        """Reduce the spans of a label to one number.

        Args:
            label: The name of the spans.
            operation: One of mean, median, min, max, std, sum, count.

        Raises:
            KeyError: The label was never measured.
            ValueError: The operation is unknown.
        """
        return _reduction(operation)(self.get_elapsed(label))

    def get_timing_metrics(
        self, reduction_op: str | Mapping[str, str] = "mean"
    ) -> dict[str, float]:
        """Reduce all labels.

        Args:
            reduction_op: One operation for all labels, or one per label; a label that
                the mapping does not name is averaged.

        Raises:
            ValueError: An operation is unknown.
        """
        with self._lock:
            # Copied under the lock and reduced outside of it, which takes longer.
            spans = {label: list(values) for label, values in self._elapsed.items()}
        if isinstance(reduction_op, str):
            reduce = _reduction(reduction_op)
            return {label: reduce(values) for label, values in spans.items()}
        reductions = {label: _reduction(op) for label, op in reduction_op.items()}
        mean = _REDUCTIONS["mean"]
        return {
            label: reductions.get(label, mean)(values)
            for label, values in spans.items()
        }

    def reset(self, label: str | None = None) -> None:
        """Forget the spans of one label, or everything, markers included."""
        with self._lock:
            if label is None:
                self._running.clear()
                self._elapsed.clear()
                self._markers.clear()
                self._spans.clear()
            else:
                self._running.pop(label, None)
                self._elapsed.pop(label, None)
                # A new deque, because deques cannot be filtered in place.
                kept = [span for span in self._spans if span[0] != label]
                self._spans = deque(kept, maxlen=_MOST_SPANS)


def _who_this_is() -> dict[str, Any]:
    """Return the fields of a span that name this process."""
    context = current_log_context()
    actor, rank = context.get("actor"), context.get("rank")
    name = "driver" if actor is None else str(actor)
    return {
        "process": name if rank is None or actor is None else f"{name}[{rank}]",
        "node": str(context.get("node") or socket.gethostname()),
        "pid": os.getpid(),
    }


def convert_to_seconds(text: str, *, name: str = "timeout") -> int:
    """Read a duration of the form `DD:HH:MM:SS`.

    Args:
        text: The duration.
        name: The field it comes from, for the message.

    Raises:
        ConfigError: The text has another form, or a part is out of range.
    """
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"{name} must have the form DD:HH:MM:SS: got {text!r}; "
            "three hours and 45 minutes are 00:03:45:00"
        )
    days, hours, minutes, seconds = (int(part) for part in parts)
    for value, limit, unit in (
        (hours, 24, "HH"),
        (minutes, 60, "MM"),
        (seconds, 60, "SS"),
    ):
        if value >= limit:
            raise ConfigError(
                f"{name}: {unit} must be below {limit}: got {value} in {text!r}"
            )
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TimeoutChecker:
    """Says once that a checkpoint is due before the time of a job runs out.

    The clock starts when the checker is made.

    Args:
        timeout: `DD:HH:MM:SS` from now until the checkpoint must be saved; None never
            asks for one.
        fit_last_save_time: Ask one mean iteration early, so that the iteration after
            the save would not have fitted.
        clock: Seconds from any fixed moment on; never goes back.
    """

    def __init__(
        self,
        timeout: str | None = None,
        fit_last_save_time: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = (
            math.inf if timeout is None else float(convert_to_seconds(timeout))
        )
        self._fit_last_save_time = fit_last_save_time
        self._clock = clock
        self._start_s = clock()
        self._iteration_start_s: float | None = None
        self._num_iterations = 0
        self._iterations_total_s = 0.0
        self._asked = False

    def set_timeout(self, timeout: str | None) -> None:
        """Take another limit, which counts from the making of the checker too."""
        self._timeout_s = (
            math.inf if timeout is None else float(convert_to_seconds(timeout))
        )
        self._asked = False

    def start_iterations(self) -> None:
        """Note that the first iteration begins now."""
        self._iteration_start_s = self._clock()

    def mark_iteration(self) -> None:
        """Note that an iteration ended and the next one begins.

        Without an earlier `start_iterations` there is nothing to measure from, and the
        call only begins the next iteration.
        """
        now = self._clock()
        if self._iteration_start_s is not None:
            self._num_iterations += 1
            self._iterations_total_s += now - self._iteration_start_s
        self._iteration_start_s = now

    def check_save(self) -> bool:
        """Return True once, when the checkpoint is due."""
        # Only one save is due per time limit.
        if self._asked:
            return False
        reserve_s = 0.0
        if self._fit_last_save_time and self._num_iterations:
            reserve_s = self._iterations_total_s / self._num_iterations
        self._asked = self._clock() - self._start_s + reserve_s >= self._timeout_s
        return self._asked
