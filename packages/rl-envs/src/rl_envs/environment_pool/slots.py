"""`Slots`: how many rows may be in a lane, and who waits for one to leave.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | a slot | a row | a free slot | `give`, `close`, its own deadline |
| lane | a row | a free slot | - | - |

Callers are served in their order, threads and coroutines alike: each waits for a
`Future`, which is done when the slot is its own.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

__all__ = ["Slots"]


class Slots:
    """A fixed number of slots.

    Args:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._free = number
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()
        self._closed: BaseException | None = None
        self.peak = 0
        """Most slots that were taken at a time."""

    @property
    def taken(self) -> int:
        """Number of slots that are taken."""
        return self._number - self._free

    def take(self) -> Future[None]:
        """Return a ticket that is done once a slot is the caller's."""
        ticket: Future[None] = Future()
        with self._lock:
            if self._closed is not None:
                ticket.set_exception(self._closed)
            elif self._free and not self._waiting:
                self._grant(ticket)
            else:
                self._waiting.append(ticket)
        return ticket

    def give(self) -> None:
        """Free a slot, for the caller that has waited longest."""
        with self._lock:
            self._free += 1
            while self._free and self._waiting:
                self._grant(self._waiting.popleft())

    def abandon(self, ticket: Future[None]) -> None:
        """Wait no longer; a slot that was granted meanwhile is free again."""
        if not ticket.cancel() and ticket.exception() is None:
            self.give()

    def close(self, error: BaseException) -> None:
        """Let all who wait, and all who come, have an error."""
        with self._lock:
            self._closed = error
            while self._waiting:
                ticket = self._waiting.popleft()
                if ticket.set_running_or_notify_cancel():
                    ticket.set_exception(error)

    def _grant(self, ticket: Future[None]) -> None:
        # False: its caller waits no longer.
        if ticket.set_running_or_notify_cancel():
            self._free -= 1
            self.peak = max(self.peak, self.taken)
            ticket.set_result(None)
