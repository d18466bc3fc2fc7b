"""`Deadlines`: the points in time at which the schedule stops waiting."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from rl_algorithms.asynchronous.workers import Worker

__all__ = ["Deadlines", "Wait"]

# Number of cleared waits that may always stay in the heap, so that a small one is not
# rebuilt again and again.
_LEAST_HEAP = 64


class Wait(NamedTuple):
    """Something that the schedule is waiting for."""

    what: str
    """One of start, rest, load, answer, score, step, save and progress."""
    who: Worker | None = None
    """Worker that has to act."""
    number: int = 0
    """Task of an answer or a score; otherwise the incarnation of the worker."""


class Deadlines:
    """The latest end of each wait, in seconds of the driver's clock."""

    def __init__(self) -> None:
        self._ends: dict[Wait, tuple[float, int, Wait]] = {}
        # The same entries ordered by time, because the driver asks for the earliest end
        # at each event. A heap cannot drop an entry from its middle, so cleared and
        # replaced ones stay until they reach the top.
        self._heap: list[tuple[float, int, Wait]] = []
        self._num_set = 0

    def set(self, wait: Wait, end_s: float) -> None:
        """Set or replace the deadline of a wait."""
        self._num_set += 1
        # The number keeps the order of waits that end at the same time.
        entry = self._ends[wait] = end_s, self._num_set, wait
        heappush(self._heap, entry)
        # Long runs clear nearly every wait early: without a rebuild the heap would grow
        # with the number of answers ever sampled.
        if len(self._heap) > _LEAST_HEAP + 2 * len(self._ends):
            self._heap = list(self._ends.values())
            heapify(self._heap)

    def clear(self, wait: Wait) -> None:
        """Stop waiting."""
        self._ends.pop(wait, None)

    def clear_worker(self, worker: Worker) -> None:
        """Stop waiting for anything from this worker."""
        for wait in [wait for wait in self._ends if wait.who == worker]:
            del self._ends[wait]

    def next_s(self) -> float | None:
        """Return the earliest deadline, or None without any wait."""
        while self._heap:
            entry = self._heap[0]
            # The very entry: a later one of the same wait may end at the same time.
            if self._ends.get(entry[2]) is entry:
                return entry[0]
            heappop(self._heap)
        return None

    def take_passed(self, now_s: float) -> list[Wait]:
        """Remove and return the waits whose deadline has passed, earliest first."""
        passed = []
        while (end_s := self.next_s()) is not None and end_s <= now_s:
            wait = heappop(self._heap)[2]
            del self._ends[wait]
            passed.append(wait)
        return passed

    def __contains__(self, wait: Wait) -> bool:
        return wait in self._ends
