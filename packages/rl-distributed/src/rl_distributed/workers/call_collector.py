"""`CallCollector`: what all workers of this program execute, and when.

```
part         consumes              produces               waits for
GroupWatch   lines of workers      CallReport, by deliver nothing
collector    reports               calls of a window      nothing
```
Reports arrive with the signs of life, at least once a second from a worker that
executes something. A worker that is stopped, dead or out of reach reports nothing, and
nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from rl_distributed.workers.call_recorder import CallReport, TimedCall, add_calls

__all__ = ["CallCollector", "WorkerCalls", "add_source", "deliver"]

# Kept of one worker until they are asked for; older ones are only summed up.
_MOST_CALLS = 20_000
# A worker that reports nothing for longer, three times the usual, is not shown.
_GONE_S = 15.0


class CallSource(Protocol):
    """What can ask workers for a report."""

    def ask_all(self, timeout_s: float) -> None:
        """Have all workers report now; wait for those that do so in time."""


@dataclass(frozen=True, slots=True)
class WorkerCalls:
    """What one worker executed in a window of time."""

    name: str
    """Group and rank: `embed[3]`."""
    node: str
    pid: int
    calls: tuple[TimedCall, ...]
    """Calls that touch the window, by their begin; those that go on end with it."""
    summed: Mapping[str, tuple[int, float]]
    """Number and seconds of further short calls, by method."""
    memory_bytes: int
    """Most resident memory that was reported."""
    gpu_memory_bytes: int | None
    """Most memory of GPUs that torch had allocated so far; None: it uses none."""


@dataclass(slots=True)
class _Worker:
    name: str
    node: str
    pid: int
    at_s: float
    ended: list[TimedCall] = field(default_factory=list)
    running: tuple[TimedCall, ...] = ()
    summed: dict[str, tuple[int, float]] = field(default_factory=dict)
    memory_bytes: int = 0
    newest_memory_bytes: int = 0
    gpu_memory_bytes: int | None = None


# Only for adding and listing; nothing is called under it.
_lock = threading.Lock()
_collectors: WeakSet[CallCollector] = WeakSet()
_sources: WeakSet[CallSource] = WeakSet()


def add_source(source: CallSource) -> None:
    """Have collectors ask these workers, too, for as long as the source lives."""
    with _lock:
        _sources.add(source)


def deliver(group: str, rank: int, report: CallReport) -> None:
    """Pass a report of a worker on to all collectors."""
    with _lock:
        collectors = list(_collectors)
    for collector in collectors:
        collector.add(f"{group}[{rank}]", report)


class CallCollector:
    """Collects the calls of all worker groups of this program, from now on.

    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[str, str, int], _Worker] = {}
        self._lock = threading.Lock()
        with _lock:
            _collectors.add(self)

    def add(self, name: str, report: CallReport) -> None:
        """Take a report of a worker."""
        key = (name, report.node, report.pid)
        with self._lock:
            worker = self._workers.get(key)
            if worker is None:
                worker = _Worker(*key, report.at_s)
                self._workers[key] = worker
            worker.at_s = report.at_s
            worker.ended += report.ended
            for call in worker.ended[:-_MOST_CALLS]:
                add_calls(worker.summed, call.method, 1, call.seconds)
            del worker.ended[:-_MOST_CALLS]
            worker.running = report.running
            for method, (number, seconds) in report.summed.items():
                add_calls(worker.summed, method, number, seconds)
            worker.newest_memory_bytes = report.memory_bytes
            worker.memory_bytes = max(worker.memory_bytes, report.memory_bytes)
            if report.gpu_memory_bytes is not None:
                worker.gpu_memory_bytes = report.gpu_memory_bytes

    def take(self, start_s: float, end_s: float) -> list[WorkerCalls]:
        """Return what the workers executed in a window, and forget what ended in it.

        Windows follow one another. A call that goes on at the end of one is in the next
        one again, with the same begin.

        Args:
            start_s: Begin of the window, in seconds since the epoch.
            end_s: Its end.
        """
        with self._lock:
            for key, worker in list(self._workers.items()):
                if worker.at_s < start_s - _GONE_S and not worker.ended:
                    del self._workers[key]
            workers = [worker for _, worker in sorted(self._workers.items())]
            return [_take(worker, start_s, end_s) for worker in workers]

    def flush(self, timeout_s: float) -> None:
        """Have all workers report now; wait no longer than this for all of them."""
        with _lock:
            sources = list(_sources)
        end = time.monotonic() + timeout_s
        for source in sources:
            source.ask_all(max(end - time.monotonic(), 0.0))


def _take(worker: _Worker, start_s: float, end_s: float) -> WorkerCalls:
    calls = [call for call in worker.ended if call.end_s <= end_s]
    worker.ended = [call for call in worker.ended if call.end_s > end_s]
    # Of a worker that is dead or stopped, the last report says nothing of this window.
    running = [call for call in worker.running if call.end_s > start_s]
    calls += [
        TimedCall(call.method, call.start_s, min(end_s, call.end_s) - call.start_s)
        for call in (*worker.ended, *running)
        if call.start_s < end_s
    ]
    calls.sort(key=lambda call: (call.start_s, -call.end_s))
    taken = WorkerCalls(
        worker.name,
        worker.node,
        worker.pid,
        tuple(calls),
        worker.summed,
        worker.memory_bytes,
        worker.gpu_memory_bytes,
    )
    worker.summed = {}
    worker.memory_bytes = worker.newest_memory_bytes
    return taken
