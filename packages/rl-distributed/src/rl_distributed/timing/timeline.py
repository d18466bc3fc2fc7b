"""`Timeline`: records when the driver and all of its workers executed what.

```
part     consumes                    produces          waits for
steps    spans of the driver         windows           nothing
writer   windows, CallCollector      timeline.jsonl    reports of a window, some seconds
close    -                           the last window   reports, at most a second
```
A window lasts from the begin of one step to that of the next. It is written some
seconds after its end, when the workers have reported what they executed in it: nobody
asks or waits for a worker. What cannot be written is left out, with a warning; the
program goes on.

Shutdown: `close` has the workers report once more, and the writer write what is left.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rl_distributed.logs.logging import get_logger
from rl_distributed.timing.timeline_file import TimelineFile
from rl_distributed.timing.tracing import Span
from rl_distributed.workers.call_collector import CallCollector, WorkerCalls
from rl_distributed.workers.call_recorder import TimedCall, add_calls, longest_calls

__all__ = ["Timeline"]

_logger = get_logger(__name__)

# Workers report once a second; a busy machine needs longer.
_SETTLE_S = 2.5
_FLUSH_S = 1.0
_CLOSE_S = 5.0
# Of one line, some 120 KB; the longest calls of each row are kept.
_MOST_CALLS, _LEAST_CALLS = 5_000, 20


@dataclass(slots=True)
class _Window:
    """The time from the begin of one step to that of the next."""

    step: int
    is_start: bool
    start_s: float
    end_s: float = 0.0
    spans: list[Span] = field(default_factory=list)


class Timeline:
    """Writes `timeline.jsonl` in the background, from now on.

    Its methods are called by one thread, and raise nothing of the file or the workers.

    Args:
        path: The file.
        settle_s: How long after the end of a window it is written.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, *, settle_s: float = _SETTLE_S) -> None:
        self._settle_s = settle_s
        self._file = TimelineFile(path)
        self._calls = CallCollector()
        self._process = psutil.Process()
        self._node = socket.gethostname()
        self._changed = threading.Condition()
        self._ended: deque[_Window] = deque()
        self._closing = self._failed = False
        self._window = _Window(0, True, time.time())
        # Held while something is taken and written, so that lines keep their order.
        self._writing = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="timeline-writer", daemon=True
        )
        self._thread.start()

    def begin_step(self, step: int, ended: Iterable[Span] = ()) -> None:
        """End the window of the last step, and begin that of another.

        Args:
            step: Number of the step; the same again goes on with its window.
            ended: Spans of the driver since the last call.
        """
        self._add(ended)
        if step == self._window.step and not self._window.is_start:
            return
        now_s = time.time()
        self._end_window(now_s)
        self._window = _Window(step, False, now_s)

    def resume_at(self, step: int) -> None:
        """Drop the windows of later steps, which come again."""
        with self._writing:
            with self._changed:
                kept = [window for window in self._ended if window.step <= step]
                self._ended = deque(kept)
            self._attempt(lambda: self._file.drop_after(step))
        self._window.step, self._window.is_start = step, True

    def close(self, ended: Iterable[Span] = ()) -> None:
        """Write what is left; a second call does nothing.

        Args:
            ended: Spans of the driver since the last call.
        """
        if self._closing:
            return
        self._add(ended)
        now_s = time.time()
        # Before the window is handed on, which may be written at once.
        self._calls.flush(_FLUSH_S)
        self._end_window(now_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        self._file.close()

    def _add(self, ended: Iterable[Span]) -> None:
        # A timer may still hold spans of an earlier use.
        start_ns = self._window.start_s * 1e9
        self._window.spans += [span for span in ended if span.end_ns >= start_ns]

    def _end_window(self, now_s: float) -> None:
        self._window.end_s = now_s
        with self._changed:
            self._ended.append(self._window)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._is_due()):
                    self._changed.wait(self._settle_s if self._ended else None)
                if not self._ended:
                    return
            with self._writing:
                with self._changed:
                    window = self._ended.popleft() if self._ended else None
                if window is not None:
                    self._attempt(lambda window=window: self._write(window))

    def _is_due(self) -> bool:
        # By the wall clock, as the windows are; one that is set back delays the file.
        due_s = time.time() - self._settle_s
        return bool(self._ended) and self._ended[0].end_s <= due_s

    def _attempt(self, work: Any) -> None:
        """Do something with the file; the first failure is the last attempt."""
        if self._failed:
            return
        try:
            work()
        except Exception as error:
            # A full disk, say. The program must not end because of its time line.
            self._failed = True
            _logger.warning(
                "the time line %s ends here, because it cannot be written: %s",
                self._file.path,
                error,
            )

    def _write(self, window: _Window) -> None:
        workers = self._calls.take(window.start_s, window.end_s)
        most = max(_MOST_CALLS // (len(workers) + 1), _LEAST_CALLS)
        methods: dict[str, int] = {}
        rows = [
            _row(worker, window.start_s, methods, most)
            for worker in (self._driver(window.spans), *workers)
        ]
        self._file.append(
            {
                "step": window.step,
                "is_start": window.is_start,
                "start_s": round(window.start_s, 6),
                "seconds": round(window.end_s - window.start_s, 6),
                "methods": list(methods),
                "rows": rows,
            }
        )

    def _driver(self, spans: Sequence[Span]) -> WorkerCalls:
        calls = [
            TimedCall(span.label, span.start_ns / 1e9, span.duration_ns / 1e9)
            for span in spans
            if span.duration_ns is not None
        ]
        calls.sort(key=lambda call: (call.start_s, -call.end_s))
        memory = self._process.memory_info().rss
        return WorkerCalls(
            "driver", self._node, os.getpid(), tuple(calls), {}, memory, None
        )


def _row(
    worker: WorkerCalls, start_s: float, methods: dict[str, int], most: int
) -> dict[str, Any]:
    calls, summed = longest_calls(worker.calls, most)
    for method, (number, seconds) in worker.summed.items():
        add_calls(summed, method, number, seconds)
    return {
        "name": worker.name,
        "node": worker.node,
        "pid": worker.pid,
        "calls": [
            [
                methods.setdefault(call.method, len(methods)),
                round((call.start_s - start_s) * 1e6),
                round(call.seconds * 1e6),
            ]
            for call in calls
        ],
        "summed": summed,
        "memory_bytes": worker.memory_bytes,
        "gpu_memory_bytes": worker.gpu_memory_bytes,
    }
