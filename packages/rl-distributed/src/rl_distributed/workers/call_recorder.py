"""What a worker executes when, as its process reports it to the driver.

```
calls --> CallRecorder --- a line beside the beats ---> CallReport --> CallCollector
          in the worker                                 in the driver
```
Nobody asks a worker for it, so a busy worker delays nobody. Between two reports the
memory is bounded, as is the size of a report: the longest calls are named one by one,
the others are summed up by method.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

__all__ = ["CallRecorder", "CallReport", "TimedCall", "add_calls", "longest_calls"]

# Between two reports, usually a second; older ones are forgotten, some 3 MB.
_MOST_CALLS = 20_000
# Of one report, some 30 KB.
_MOST_NAMED, _MOST_RUNNING = 500, 100
# A report says that a worker is there even where it executes nothing.
_IDLE_REPORT_S = 5.0
_GPU_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One execution of a method."""

    method: str
    """The method; `import` and `__init__` of the start, too."""
    start_s: float
    """Seconds since the epoch, by the clock of its node."""
    seconds: float
    """How long it took, or has taken so far."""

    @property
    def end_s(self) -> float:
        """When it ended, or was last seen."""
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True)
class CallReport:
    """What a worker has executed since its last report."""

    node: str
    pid: int
    at_s: float
    """When it was written, in seconds since the epoch."""
    ended: tuple[TimedCall, ...] = ()
    """Calls that have ended, by their end."""
    running: tuple[TimedCall, ...] = ()
    """Calls that go on."""
    summed: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Number and seconds of further short calls, by method."""
    memory_bytes: int = 0
    """Resident memory of the process."""
    gpu_memory_bytes: int | None = None
    """Most memory of its GPUs that torch had allocated; None: it uses none."""

    def line(self) -> bytes:
        """Encode the report as one line of the connection, without its newline."""
        fields = [
            self.node,
            self.pid,
            round(self.at_s, 6),
            [_plain(call) for call in self.ended],
            [_plain(call) for call in self.running],
            self.summed,
            self.memory_bytes,
            self.gpu_memory_bytes,
        ]
        return json.dumps({"calls": fields}, separators=(",", ":")).encode()

    @classmethod
    def of_fields(cls, fields: Any) -> CallReport:
        """Decode `calls` of a line that `line` has made.

        Raises:
            ValueError: It is no report.
            TypeError: It is no report.
        """
        node, pid, at_s, ended, running, summed, memory, gpu = fields
        return cls(
            str(node),
            int(pid),
            float(at_s),
            tuple(_call(*call) for call in ended),
            tuple(_call(*call) for call in running),
            {str(name): (int(n), float(s)) for name, (n, s) in dict(summed).items()},
            int(memory),
            None if gpu is None else int(gpu),
        )


def longest_calls(
    calls: Sequence[TimedCall], most: int
) -> tuple[list[TimedCall], dict[str, tuple[int, float]]]:
    """Return the longest calls, in their order, and sums of the others.

    Args:
        calls: The calls.
        most: Maximum number of calls to return.

    Returns:
        The longest calls; number and seconds of the others by method.
    """
    if len(calls) <= most:
        return list(calls), {}
    # By their place, which tells calls of the same length apart.
    places = range(len(calls))
    kept = set(heapq.nlargest(most, places, key=lambda place: calls[place].seconds))
    summed: dict[str, tuple[int, float]] = {}
    for place in places:
        if place not in kept:
            add_calls(summed, calls[place].method, 1, calls[place].seconds)
    return [calls[place] for place in sorted(kept)], summed


def add_calls(
    summed: dict[str, tuple[int, float]], method: str, number: int, seconds: float
) -> None:
    """Add calls of a method to sums by method."""
    known, known_s = summed.get(method, (0, 0.0))
    summed[method] = known + number, round(known_s + seconds, 6)


def _plain(call: TimedCall) -> list[Any]:
    return [call.method, round(call.start_s, 6), round(call.seconds, 6)]


def _call(method: Any, start_s: Any, seconds: Any) -> TimedCall:
    return TimedCall(str(method), float(start_s), float(seconds))


class CallRecorder:
    """Remembers the calls of a worker until they are reported.

    Args:
        node: Address of the node.
        running: The calls that run now: method, begin (`time.monotonic`), id.
    """

    def __init__(
        self, node: str, running: Callable[[], Sequence[tuple[str, float, str]]]
    ) -> None:
        self._node, self._running = node, running
        # Without a lock: a call may end in a generator that the garbage collector
        # closes, at any place of any thread. Appending to a deque is atomic.
        self._ended: deque[tuple[str, float, float]] = deque(maxlen=_MOST_CALLS)
        self._process = psutil.Process()
        self._gpu_memory: int | None = None
        self._gpu_due_s = 0.0
        self._reported_s = float("-inf")

    def add(self, method: str, began_s: float) -> None:
        """Note that a call has ended now.

        Args:
            method: The method.
            began_s: When it began, by `time.monotonic`.
        """
        now_s = time.monotonic()
        self._ended.append((method, began_s, now_s))
        # Here and not where the report is made: torch answers under a lock that a
        # busy GPU may hold for seconds, and signs of life must not wait for it.
        if now_s >= self._gpu_due_s:
            self._gpu_due_s = now_s + _GPU_EVERY_S
            self._gpu_memory = _gpu_memory_bytes()

    def take_line(self) -> bytes | None:
        """Return what is new as a line of the connection; None: nothing is.

        Called by one thread only.
        """
        now_s = time.monotonic()
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        running = sorted(self._running(), key=lambda call: call[1])[:_MOST_RUNNING]
        is_due = now_s - self._reported_s >= _IDLE_REPORT_S
        if not ended and not running and not is_due:
            return None
        self._reported_s = now_s
        # The wall clock may be set while the worker runs, so it is read each time.
        epoch_s = time.time() - now_s
        calls = [
            TimedCall(method, began_s + epoch_s, end_s - began_s)
            for method, began_s, end_s in ended
        ]
        named, summed = longest_calls(calls, _MOST_NAMED)
        return CallReport(
            self._node,
            os.getpid(),
            now_s + epoch_s,
            tuple(named),
            tuple(
                TimedCall(method, began_s + epoch_s, max(now_s - began_s, 0.0))
                for method, began_s, _ in running
            ),
            summed,
            self._memory_bytes(),
            self._gpu_memory,
        ).line()

    def _memory_bytes(self) -> int:
        try:
            return int(self._process.memory_info().rss)
        except psutil.Error:
            # Signs of life must not end because the system hides it.
            return 0


def _gpu_memory_bytes() -> int | None:
    # Asked for and not imported: a worker without torch has nothing there.
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        devices = range(torch.cuda.device_count())
        return sum(int(torch.cuda.max_memory_allocated(one)) for one in devices)
    except (AttributeError, RuntimeError, AssertionError):
        # The module is half imported, or the device has failed.
        return None
