"""`Deadlines`: when the schedule stops waiting for what."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from rl_algorithms.asynchronous.workers import Worker

__all__ = ["Deadlines", "Wait"]

# Cleared waits that may stay in the heap whatever is waited for.
_LEAST_HEAP = 64


class Wait(NamedTuple):
    """Something that is waited for."""

    what: str
    """start, rest, load, answer, score, step, save or progress."""
    who: Worker | None = None
    """The worker that is waited for."""
    number: int = 0
    """The task of an answer or a score; else the incarnation of the worker."""


class Deadlines:
    """When each wait ends at the latest, in seconds of the driver's clock."""

    def __init__(self) -> None:
        self._ends: dict[Wait, tuple[float, int]] = {}
        # The same by time. What was cleared or replaced stays until it is met: the
        # driver asks for the earliest end at each event.
        self._heap: list[tuple[float, int, Wait]] = []
        self._num_set = 0

    def set(self, wait: Wait, end_s: float) -> None:
        """Wait until this time; an earlier deadline of the same wait is replaced."""
        self._num_set += 1
        self._ends[wait] = end_s, self._num_set
        heappush(self._heap, (end_s, self._num_set, wait))
        if len(self._heap) > _LEAST_HEAP + 2 * len(self._ends):
            self._heap = [(*end, wait) for wait, end in self._ends.items()]
            heapify(self._heap)

    def clear(self, wait: Wait) -> None:
        """Wait no longer."""
        self._ends.pop(wait, None)

    def clear_worker(self, worker: Worker) -> None:
        """Wait for nothing of this worker any longer."""
        for wait in [wait for wait in self._ends if wait.who == worker]:
            del self._ends[wait]

    def next_s(self) -> float | None:
        """Return the earliest end; None: nothing is waited for."""
        while self._heap:
            end_s, number, wait = self._heap[0]
            if self._ends.get(wait) == (end_s, number):
                return end_s
            heappop(self._heap)
        return None

    def take_passed(self, now_s: float) -> list[Wait]:
        """Return the waits whose time is up, earliest first, and end them."""
        passed = []
        while (end_s := self.next_s()) is not None and end_s <= now_s:
            wait = heappop(self._heap)[2]
            del self._ends[wait]
            passed.append(wait)
        return passed

    def __contains__(self, wait: Wait) -> bool:
        return wait in self._ends
