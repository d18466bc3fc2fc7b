"""Spans of several processes on one timeline, as a Chrome trace.

The file opens in `chrome://tracing` and in Perfetto's viewer. A `Span` is a plain
record, so workers return theirs like any other result:

```python
spans = timer.get_spans()
for found in ray.get(group.run_all_workers_single_data("spans")):
    spans += found
export_chrome_trace("trace.json", spans)
```
Timelines are laid over each other by the clocks of the nodes, so they are as exact as
those are synchronised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Span", "chrome_trace", "export_chrome_trace"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, or happened, in one thread of one process."""

    label: str
    """What it was."""
    start_ns: int
    """Nanoseconds since the epoch."""
    duration_ns: int | None
    """How long it took; None: it is a moment."""
    process: str = "driver"
    """Whose it is: `driver`, or group and rank of a worker, `embed[3]`."""
    node: str = ""
    """Name or address of the node."""
    pid: int = 0
    """The process's number on its node."""
    thread_id: int = 0
    """The thread's number in its process."""
    thread_name: str = ""
    """The thread's name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Shown with the span; anything that JSON lacks becomes text."""

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + (self.duration_ns or 0)


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Return spans in the Trace Event Format, with times from the first one on.

    Each process has its own group of tracks, named by worker, node and process number.
    Spans of one thread that overlap without one being inside of the other, which
    viewers cannot draw, get a further track.

    Args:
        spans: Spans of any number of processes, in any order.
    """
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    start_ns = ordered[0].start_ns if ordered else 0
    processes: dict[tuple[str, str, int], list[Span]] = {}
    for span in ordered:
        key = (span.process, span.node, span.pid)
        processes.setdefault(key, []).append(span)
    events: list[dict[str, Any]] = []
    # Numbers of our own: nodes use the same process numbers.
    for number, key in enumerate(sorted(processes, key=_process_order), start=1):
        name = f"{key[0]} (node {key[1] or '?'}, pid {key[2]})"
        events.append(_name("process_name", number, 0, name))
        sort = {"sort_index": number}
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "args": sort}
        )
        events += _process_events(processes[key], number, start_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"start_time_s": start_ns / 1e9},
    }


def export_chrome_trace(path: str | os.PathLike[str], spans: Iterable[Span]) -> Path:
    """Write spans to a file that `chrome://tracing` and Perfetto open.

    The file is replaced as a whole.

    Args:
        path: The file; its folder is created.
        spans: Spans of any number of processes, in any order.

    Returns:
        The path of the file.

    Raises:
        OSError: It cannot be written.
    """
    target = Path(path)
    text = json.dumps(chrome_trace(spans), default=str, separators=(",", ":"))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it and renamed, so that a viewer never reads half a trace.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _process_order(key: tuple[str, str, int]) -> tuple[Any, ...]:
    """Sort the driver first, then groups by name and ranks by number."""
    name, bracket, rank = key[0].partition("[")
    number = rank.rstrip("]")
    return (
        bool(bracket),
        name,
        int(number) if number.isdigit() else -1,
        *key,
    )


def _process_events(
    spans: list[Span], number: int, start_ns: int
) -> list[dict[str, Any]]:
    threads: dict[int, list[Span]] = {}
    for span in spans:
        threads.setdefault(span.thread_id, []).append(span)
    events: list[dict[str, Any]] = []
    track = 0
    for thread_spans in threads.values():
        for lane, lane_spans in enumerate(_lanes(thread_spans), start=1):
            track += 1
            name = thread_spans[0].thread_name or f"thread {thread_spans[0].thread_id}"
            name = name if lane == 1 else f"{name} ({lane})"
            events.append(_name("thread_name", number, track, name))
            events += [_event(span, number, track, start_ns) for span in lane_spans]
    return events


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Distribute spans, ordered by start, so that in each lane they nest."""
    lanes: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in spans:
        for lane, ends in zip(lanes, open_ends, strict=True):
            # Spans that have ended no longer contain later ones.
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                lane.append(span)
                ends.append(span.end_ns)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end_ns])
    return lanes


def _event(span: Span, process: int, track: int, start_ns: int) -> dict[str, Any]:
    event = {
        "name": span.label,
        "cat": span.label.partition("/")[0],
        "pid": process,
        "tid": track,
        "ts": (span.start_ns - start_ns) / 1000,
        "args": {str(key): value for key, value in span.metadata.items()},
    }
    if span.duration_ns is None:
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": span.duration_ns / 1000}


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": track,
        "args": {"name": name},
    }
