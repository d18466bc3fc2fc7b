"""What happens inside the actor of a `BoundedQueue`. Pure asyncio, without Ray.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| `put` | items of a producer | the number accepted | room | `get`, its time |
| `get` | items | the consumer's items | an item, the end | `put`, `close`, its time |
| a watch per actor | pings | a departure | the answer to a ping | the actor's death |

Everything runs in one event loop, so that state changes only between awaits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Answer", "QueueHost"]

_PING_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """What `get` found."""

    state: Literal["items", "empty", "closed", "broken"]
    """Items; none yet; all producers have closed; a producer died before it closed."""
    items: list[Any] = field(default_factory=list)
    detail: str = ""
    """Who is waited for, or who died."""


class QueueHost:
    """Holds the items of a queue.

    Args:
        max_items: The most items that wait at a time.
        num_producers: How many clients must close it.
        redeliver: Whether items that a consumer has not confirmed are given to others
            when it dies.
    """

    def __init__(self, max_items: int, num_producers: int, redeliver: bool) -> None:
        self._max_items = max_items
        self._num_producers = num_producers
        self._redeliver = redeliver
        self._items: deque[Any] = deque()
        self._unconfirmed: dict[str, list[Any]] = {}
        self._labels: dict[str, str] = {}
        self._producers: set[str] = set()
        self._closed: set[str] = set()
        self._died: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._gone: set[str] = set()

    async def put(
        self, client: str, items: list[Any], wait_s: float
    ) -> tuple[int, bool]:
        """Accept items in order while there is room, for `wait_s` at most.

        Returns:
            How many were accepted, and whether the queue is closed.
        """
        self._producers.add(client)
        accepted = 0
        until_s = asyncio.get_running_loop().time() + wait_s
        while accepted < len(items) and not self._is_closed(client):
            room = self._max_items - len(self._items)
            if room > 0:
                part = items[accepted : accepted + room]
                self._items.extend(part)
                accepted += len(part)
                await self._notify()
            elif not await self._wait(until_s, lambda: self._has_room(client)):
                break
        return accepted, self._is_closed(client)

    async def get(self, client: str, most: int, wait_s: float) -> Answer:
        """Up to `most` items once there is one; confirms what the client got before."""
        await self.confirm(client)
        until_s = asyncio.get_running_loop().time() + wait_s
        await self._wait(until_s, lambda: bool(self._items) or self._is_over())
        if client in self._gone:
            return Answer("empty", detail="this client died")
        if self._items:
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            if self._redeliver and client in self._watches:
                self._unconfirmed[client] = taken
            await self._notify()
            return Answer("items", taken)
        if not self._is_over():
            return Answer("empty", detail=self._waited_for())
        if self._died:
            return Answer("broken", detail=", ".join(self._died.values()))
        return Answer("closed")

    async def confirm(self, client: str) -> None:
        """The client is done with what it got."""
        if self._unconfirmed.pop(client, None):
            await self._notify()

    async def close(self, client: str) -> None:
        """The client puts no more."""
        self._producers.add(client)
        self._closed.add(client)
        await self._notify()

    def qsize(self) -> int:
        """The number of items that wait."""
        return len(self._items)

    def watch(
        self, client: str, label: str, ping: Callable[[], Awaitable[bool]]
    ) -> None:
        """Keep looking whether a client lives.

        Args:
            client: Its key.
            label: What messages call it.
            ping: Returns False once the client is known to be dead.
        """
        self._labels[client] = label
        self._watches[client] = asyncio.create_task(self._watch(client, ping))

    async def _watch(self, client: str, ping: Callable[[], Awaitable[bool]]) -> None:
        while await ping():
            await asyncio.sleep(_PING_EVERY_S)
        # A call of the client that still waits must not take anything any more.
        self._gone.add(client)
        label = self._labels[client]
        if client in self._producers and client not in self._closed:
            self._died[client] = label
            self._closed.add(client)
        # What it has not confirmed is older than what waits.
        self._items.extendleft(reversed(self._unconfirmed.pop(client, [])))
        await self._notify()

    def _is_closed(self, client: str) -> bool:
        return client in self._closed or len(self._closed) >= self._num_producers

    def _has_room(self, client: str) -> bool:
        return len(self._items) < self._max_items or self._is_closed(client)

    def _is_over(self) -> bool:
        """Whether no item will ever come again."""
        all_closed = len(self._closed) >= self._num_producers
        return all_closed and not self._items and not self._unconfirmed

    def _waited_for(self) -> str:
        held = {
            self._labels.get(client, client): len(items)
            for client, items in self._unconfirmed.items()
        }
        text = f"{len(self._closed)} of {self._num_producers} producers have closed"
        if held:
            listed = ", ".join(f"{who} has {count}" for who, count in held.items())
            text += f"; not confirmed yet: {listed}"
        return text

    async def _wait(self, until_s: float, ready: Callable[[], bool]) -> bool:
        left_s = until_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(left_s, 0.0)), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            return False
        return True

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
