"""`Deadlines`: when the schedule stops waiting for what."""

from __future__ import annotations

from typing import NamedTuple

from rl_algorithms.asynchronous.workers import Worker

__all__ = ["Deadlines", "Wait"]


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
        self._ends: dict[Wait, float] = {}

    def set(self, wait: Wait, end_s: float) -> None:
        """Wait until this time; an earlier deadline of the same wait is replaced."""
        self._ends[wait] = end_s

    def clear(self, wait: Wait) -> None:
        """Wait no longer."""
        self._ends.pop(wait, None)

    def clear_worker(self, worker: Worker) -> None:
        """Wait for nothing of this worker any longer."""
        for wait in [wait for wait in self._ends if wait.who == worker]:
            del self._ends[wait]

    def next_s(self) -> float | None:
        """Return the earliest end; None: nothing is waited for."""
        return min(self._ends.values(), default=None)

    def take_passed(self, now_s: float) -> list[Wait]:
        """Return the waits whose time is up, earliest first, and end them."""
        passed = sorted(
            (end_s, order, wait)
            for order, (wait, end_s) in enumerate(self._ends.items())
            if end_s <= now_s
        )
        for _, _, wait in passed:
            del self._ends[wait]
        return [wait for _, _, wait in passed]

    def __contains__(self, wait: Wait) -> bool:
        return wait in self._ends
