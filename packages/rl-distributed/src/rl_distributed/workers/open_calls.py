"""`OpenCalls`: the calls of a group that have a deadline and may not have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["CallDeadline", "OpenCalls"]


@dataclass(slots=True, eq=False)
class CallDeadline:
    """The deadline of one call."""

    end: float
    """`time.monotonic()` at which it passes."""
    detail: Callable[[], str]
    """The words for a report; called after `late`."""
    late: Callable[[], tuple[tuple[int, int], ...]]
    """The (rank, incarnation) of each worker that is not done; asks Ray."""
    what: str
    """The call, for a report of what is waited for."""


class OpenCalls:
    """The deadlines of calls, added by callers and looked through by the watch.

    Args:
        look_s: how often calls that have ended are dropped. A deadline refers to the
            results of its call, and so keeps them in memory.
    """

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._next_look = 0.0
        self._lock = threading.Lock()
        self._deadlines: list[CallDeadline] = []

    def add(self, deadline: CallDeadline) -> None:
        """Note the deadline of a call that was just sent."""
        with self._lock:
            self._deadlines.append(deadline)

    @property
    def next_end(self) -> float:
        """`time.monotonic()` of the first deadline; infinite if there is none."""
        with self._lock:
            return min((d.end for d in self._deadlines), default=float("inf"))

    def running(self) -> list[tuple[float, str]]:
        """Return the end of the deadline, and the words, of each call that goes on."""
        return [(d.end, d.what) for d in self._all() if d.late()]

    def take_passed(self, now: float) -> list[CallDeadline]:
        """Return the deadlines that have passed, and forget them."""
        with self._lock:
            passed = [d for d in self._deadlines if d.end <= now]
            self._deadlines = [d for d in self._deadlines if d.end > now]
        return passed

    def drop_ended(self, now: float) -> None:
        """Forget calls that have ended, if it is time to look."""
        if now < self._next_look:
            return
        self._next_look = now + self._look_s
        ended: set[CallDeadline] = set()
        # Outside the lock, because `late` asks Ray, which may have been shut down by
        # now: then nothing is dropped.
        with suppress(Exception):
            ended.update(d for d in self._all() if not d.late())
        with self._lock:
            self._deadlines = [d for d in self._deadlines if d not in ended]

    def _all(self) -> list[CallDeadline]:
        with self._lock:
            return list(self._deadlines)
