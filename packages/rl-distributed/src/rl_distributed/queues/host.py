"""The inside of the actor of a `BoundedQueue`: pure asyncio, without Ray.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| `put` | items of a producer | the number accepted | room | `get`, its time |
| `get` | items | the consumer's items | an item, the end | `put`, `close`, its time |
| a watch per process | pings | a departure | the answer to a ping | its death |

A *client* is one copy of the queue. A *producer* puts items through any number of
clients. It is a worker, an actor or a registered name, not a process: after a restart
it goes on as the same producer.

Everything runs in one event loop, so that state changes only between awaits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["Answer", "ClientOrigin", "QueueHost", "QueueOverError"]

# Deaths are noticed within about a second, as `BoundedQueue` promises.
_PING_EVERY_S = 0.5


class QueueOverError(Exception):
    """The queue was ended, and is not there any more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one `get`."""

    state: Literal["items", "empty", "closed", "broken"]
    """Items; none yet; all producers have closed; a producer died before it closed."""
    items: list[Any] = field(default_factory=list)
    detail: str = ""
    """The process that is waited for, or that died."""


@dataclass(frozen=True, slots=True)
class ClientOrigin:
    """Origin of a client: its producer and process."""

    producer: str
    """Key of its producer: the same before and after a restart."""
    process: str = ""
    """Its process, another one after a restart; empty: its death is never known."""
    label: str = ""
    """Its name in messages."""


@dataclass(slots=True)
class _Producer:
    origin: ClientOrigin
    """Of its present process."""
    is_registered: bool = False
    died_at: float | None = None
    """Time of the loop; None: as far as is known it is alive."""
    closed: dict[str, set[str]] = field(default_factory=dict)
    """The clients that have closed, by process."""

    @property
    def num_closed(self) -> int:
        """How often it counts as closed; closing again after a restart counts once."""
        return max(map(len, self.closed.values()), default=0)

    @property
    def is_dead(self) -> bool:
        """Whether it died before it had closed, and is not back."""
        return self.died_at is not None

    @property
    def is_open(self) -> bool:
        """Whether it lives and has not closed since it was started."""
        return not self.is_dead and not self.closed.get(self.origin.process)


class QueueHost:
    """Holds the items of a queue.

    Args:
        max_items: The most items that wait at a time.
        num_producers: How often the queue must be closed before it is over.
        redeliver: Whether items that a consumer has not confirmed are given to others
            when it dies.
        producer_return_s: How long consumers wait for a dead producer to come back
            once all others have closed.
    """

    def __init__(
        self,
        max_items: int,
        num_producers: int,
        redeliver: bool,
        producer_return_s: float = 0.0,
    ) -> None:
        self._max_items = max_items
        self._num_producers = num_producers
        self._redeliver = redeliver
        self._return_s = producer_return_s
        self._items: deque[Any] = deque()
        self._unconfirmed: dict[str, list[Any]] = {}
        self._origins: dict[str, ClientOrigin] = {}
        self._producers: dict[str, _Producer] = {}
        self._changed = asyncio.Condition()
        self._num_changes = 0
        # By process: one that is sent the queue with each call has many clients.
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        """Processes that are gone."""
        self._is_over = False

    async def end(self) -> None:
        """Drop everything; calls that wait raise `QueueOverError`."""
        self._is_over = True
        # A watch left running would ping its actor for as long as this process lives.
        for watch in self._watches.values():
            watch.cancel()
        await self._notify()

    async def put(
        self, client: str, items: list[Any], wait_s: float
    ) -> tuple[int, bool]:
        """Accept items in order while there is room, for `wait_s` at most.

        Returns:
            How many were accepted, and whether the queue is closed.
        """
        accepted = 0
        until_s = _now() + wait_s
        # A late `put` must not reopen the producer of a client that has closed.
        if not self._is_closed(client):
            self._begin(client)
        while accepted < len(items) and not self._is_closed(client):
            room = self._max_items - len(self._items)
            if room > 0:
                part = items[accepted : accepted + room]
                # As many as fit, so that consumers can start before the rest has room.
                self._items.extend(part)
                accepted += len(part)
                await self._notify()
            elif _now() >= until_s:
                break
            else:
                await self._wait_for_change(until_s)
        return accepted, self._is_closed(client)

    async def get(self, client: str, most: int, wait_s: float) -> Answer:
        """Up to `most` items once there is one; confirms what the client got before."""
        await self.confirm(client)
        until_s = _now() + wait_s
        while True:
            # A call left behind by a dead consumer would take items that
            # nobody receives.
            if self._origin(client).process in self._ended:
                return Answer("empty", detail="this client died")
            if self._items:
                return Answer("items", await self._take(client, most))
            ends_at = self._ends_at()
            if ends_at is not None and _now() >= ends_at:
                dead = ", ".join(p.origin.label for p in self._dead())
                return Answer("broken" if dead else "closed", detail=dead)
            if _now() >= until_s:
                return Answer("empty", detail=self._waited_for())
            await self._wait_for_change(
                until_s if ends_at is None else min(until_s, ends_at)
            )

    async def _take(self, client: str, most: int) -> list[Any]:
        taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
        # The death of an unwatched client would go unnoticed and its
        # items would be stuck.
        if self._redeliver and self._origin(client).process:
            self._unconfirmed[client] = taken
        await self._notify()
        return taken

    async def confirm(self, client: str) -> None:
        """Confirm that the client has finished the items that it got."""
        if self._unconfirmed.pop(client, None):
            await self._notify()

    async def close(self, client: str) -> None:
        """Declare that the client puts no more items."""
        producer = self._begin(client)
        producer.closed.setdefault(producer.origin.process, set()).add(client)
        await self._notify()

    async def register(self, client: str, name: str) -> None:
        """Put as the producer of this name until that closes.

        One of the name that has died goes on with it.
        """
        origin = self._origin(client)
        label = f"producer {name!r}"
        if origin.label:
            label += f", {origin.label},"
        self._origins[client] = replace(origin, producer=f"name {name}", label=label)
        self._begin(client).is_registered = True
        await self._notify()

    def qsize(self) -> int:
        """Return the number of items that wait."""
        return len(self._items)

    # --- which clients are alive --------------------------------------------------

    def watch(
        self,
        client: str,
        origin: ClientOrigin | str,
        ping: Callable[[], Awaitable[bool]],
    ) -> None:
        """Keep checking that a client is alive.

        Args:
            client: Its key.
            origin: Where it is; a text is a label for one that never comes back.
            ping: Returns False once the client is known to be dead.
        """
        if isinstance(origin, str):
            origin = ClientOrigin(client, client, origin)
        self._origins[client] = origin
        # A late call of a process that is known to be gone.
        if origin.process in self._ended:
            return
        if origin.process not in self._watches:
            # Kept here, because asyncio holds tasks only by weak references.
            self._watches[origin.process] = asyncio.create_task(
                self._watch(origin.process, ping)
            )
        for earlier in list(self._origins.values()):
            same = earlier.producer == origin.producer
            if same and earlier.process not in ("", origin.process):
                # It was started again, perhaps as the same actor, which still answers.
                self._retire(earlier.process)

    async def _watch(self, process: str, ping: Callable[[], Awaitable[bool]]) -> None:
        while process not in self._ended and await ping():
            await asyncio.sleep(_PING_EVERY_S)
        self._retire(process)
        for producer in self._producers.values():
            # Another process may have its part by now.
            if producer.is_open and producer.origin.process == process:
                producer.died_at = _now()
        await self._notify()

    def _retire(self, process: str) -> None:
        """Put the unconfirmed items of a process that is gone back into the queue."""
        self._ended.add(process)
        held = [c for c in self._unconfirmed if self._origin(c).process == process]
        # To the front, because they are older than the waiting items; those that were
        # taken first come first again.
        for client in reversed(held):
            self._items.extendleft(reversed(self._unconfirmed.pop(client)))

    def _origin(self, client: str) -> ClientOrigin:
        return self._origins.get(client) or ClientOrigin(f"client {client}")

    def _begin(self, client: str) -> _Producer:
        """Note that a client's producer is there, or there again."""
        origin = self._origin(client)
        producer = self._producers.setdefault(origin.producer, _Producer(origin))
        producer.origin, producer.died_at = origin, None
        return producer

    def _dead(self) -> list[_Producer]:
        return [p for p in self._producers.values() if p.is_dead]

    # --- the end ------------------------------------------------------------------

    def _is_closed(self, client: str) -> bool:
        """Whether nothing more is taken from a client."""
        producer = self._producers.get(self._origin(client).producer)
        closed = {} if producer is None else producer.closed
        return any(client in some for some in closed.values()) or self._all_closed()

    def _all_closed(self) -> bool:
        """Whether it was closed as often as announced, and by all that registered."""
        producers = self._producers.values()
        if any(p.is_registered and (p.is_open or p.is_dead) for p in producers):
            return False
        return sum(p.num_closed for p in producers) >= self._num_producers

    def _ends_at(self) -> float | None:
        """Return the time of the loop at which the queue ends; None: not known yet."""
        if self._items or self._unconfirmed:
            return None
        dead = self._dead()
        if not self._all_closed():
            producers = self._producers.values()
            live = any(p.is_open and self._is_known(p) for p in producers)
            ends = sum(p.num_closed or p.is_dead for p in producers)
            if not dead or live or ends < self._num_producers:
                return None
        last = max((p.died_at for p in dead if p.died_at is not None), default=None)
        return float("-inf") if last is None else last + self._return_s

    @staticmethod
    def _is_known(producer: _Producer) -> bool:
        """Whether its life is known of: it registered, or its process is watched.

        A task or driver that has put something may have ended since.
        """
        return producer.is_registered or bool(producer.origin.process)

    def _waited_for(self) -> str:
        closed = sum(p.num_closed for p in self._producers.values())
        text = f"{closed} of {self._num_producers} producers have closed"
        registered = [p for p in self._producers.values() if p.is_registered]
        if waiting := [p.origin.label for p in registered if p.is_open]:
            text += f"; still open: {', '.join(waiting)}"

        if dead := [p.origin.label for p in self._dead()]:
            text += f"; dead, and not back: {', '.join(dead)}"
        held = {
            self._origin(client).label or client: len(items)
            for client, items in self._unconfirmed.items()
        }
        if held:
            listed = ", ".join(f"{who} has {count}" for who, count in held.items())
            text += f"; not confirmed yet: {listed}"
        return text

    async def _wait_for_change(self, until_s: float) -> None:
        # Read before waiting for the lock, so that no change in between is missed.
        seen = self._num_changes
        try:
            async with asyncio.timeout(max(until_s - _now(), 0.0)), self._changed:
                await self._changed.wait_for(lambda: self._num_changes != seen)
        except TimeoutError:
            return
        if self._is_over:
            raise QueueOverError

    async def _notify(self) -> None:
        async with self._changed:
            self._num_changes += 1
            self._changed.notify_all()


def _now() -> float:
    return asyncio.get_running_loop().time()
