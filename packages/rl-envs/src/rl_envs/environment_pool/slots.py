"""`Slots`: the limit on rows in a lane, and the callers waiting for a free slot.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | a slot | a row | a free slot | `give`, `close`, its own deadline |
| lane | a row | a free slot | - | - |

Callers, threads and coroutines alike, are served in order of arrival: each waits for a
`Future` that completes when the slot is granted.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

__all__ = ["Slots"]


class Slots:
    """A fixed number of slots.

    Args:
        number: Number of slots.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._free = number
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()
        self._closed: BaseException | None = None
        self.peak = 0
        """Maximum number of slots taken at the same time."""

    @property
    def taken(self) -> int:
        """Number of slots that are taken."""
        return self._number - self._free

    def take(self) -> Future[None]:
        """Return a ticket that completes once the caller holds a slot."""
        ticket: Future[None] = Future()
        with self._lock:
            if self._closed is not None:
                ticket.set_exception(self._closed)
            # A newcomer must not overtake those already waiting.
            elif self._free and not self._waiting:
                self._grant(ticket)
            else:
                self._waiting.append(ticket)
        return ticket

    def give(self) -> None:
        """Free a slot and grant it to the caller that has waited longest."""
        with self._lock:
            self._free += 1
            while self._free and self._waiting:
                self._grant(self._waiting.popleft())

    def abandon(self, ticket: Future[None]) -> None:
        """Give up a ticket; free its slot if it was granted in the meantime."""
        # It can no longer be cancelled: it was granted meanwhile, or failed at `close`.
        if not ticket.cancel() and ticket.exception() is None:
            self.give()

    def close(self, error: BaseException) -> None:
        """Fail all waiting and all future callers with an error."""
        with self._lock:
            self._closed = error
            while self._waiting:
                ticket = self._waiting.popleft()
                if ticket.set_running_or_notify_cancel():
                    ticket.set_exception(error)

    def _grant(self, ticket: Future[None]) -> None:
        # False: the caller has given up, so the slot goes to the next one.
        if ticket.set_running_or_notify_cancel():
            self._free -= 1
            self.peak = max(self.peak, self.taken)
            ticket.set_result(None)
