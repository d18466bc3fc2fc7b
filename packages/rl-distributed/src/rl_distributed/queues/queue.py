"""`BoundedQueue`: items from many producers to many consumers, on any node.

```
producer --put--> [actor: up to max_items wait] --get--> consumer
         blocks while it is full              blocks while it is empty
close() of the last producer -> consumers take the rest -> QueueClosedError
a producer dies -> the others continue; restarted, it continues as the same producer
```
Items keep their order, and each goes to one consumer. They travel as bytes (tensors out
of band) and are never unpickled in the queue's actor, which therefore needs none of
their classes.
"""

from __future__ import annotations

import os
import pickle
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray import cloudpickle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rl_distributed.batch.size_checks import require_positive
from rl_distributed.errors import (
    BatchError,
    DeadlineExceededError,
    QueueClosedError,
    WorkerDiedError,
)
from rl_distributed.process.label import process_label
from rl_distributed.queues.host import (
    Answer,
    ClientOrigin,
    QueueHost,
    QueueOverError,
)

__all__ = ["BoundedQueue"]

# Bounds one wait inside the actor, so that a dead client does not hold a slot for long.
_SLICE_S = 1.0
# Beyond its wait, the actor only has to answer.
_GRACE_S = 30.0
# Each waiting client occupies a slot of the actor, for a slice at a time.
_MAX_WAITING = 10_000


class BoundedQueue:
    """A queue between processes of one Ray cluster; `create` makes it.

    It can be passed to actors and tasks. Each copy is a client of its own: a producer,
    a consumer or both. Clients must not be shared by threads, and their calls block; an
    async actor makes them in a thread.

    What happens when a client dies (known of actors only, within about a second):

    - A producer that has not closed: the others go on, and consumers get their items.
      When it comes back (the worker of the same rank and group, or a process that
      registers under its name), it goes on as if nothing had happened. Otherwise, when
      all others have closed, consumers get the items that are left, and after
      `producer_return_s` a `WorkerDiedError` instead of `QueueClosedError`.
    - A consumer: the items it has taken are lost, and so is an item on its way to it.
      With `redeliver`, items that it has not confirmed go to other consumers, which see
      them a second time if it had begun to work on them. The next `get` or `confirm`
      confirms.
    - The actor of the queue: every call raises `WorkerDiedError`; its items are lost.
    """

    def __init__(self, name: str, host: Any, key: str) -> None:
        self.name = name
        """Name of the queue in messages."""
        self._host = host
        self._key = key
        # Random, because copies are made in processes that do not know of each other.
        self._client = uuid.uuid4().hex
        self._is_known = False

    @classmethod
    def create(
        cls,
        max_items: int,
        *,
        name: str = "queue",
        num_producers: int = 1,
        redeliver: bool = False,
        producer_return_s: float = 0.0,
        deadline_s: float = 60.0,
    ) -> BoundedQueue:
        """Start the actor of a queue. It ends with `shutdown`, or with its last user.

        Args:
            max_items: The most items that wait at a time; `put` blocks above it.
            name: For messages.
            num_producers: How many producers will call `close`, before which the queue
                does not end. It does not end before all that `register` either.
            redeliver: Whether unconfirmed items of a dead consumer go to others. The
                end of the queue then waits for all confirmations.
            producer_return_s: How long consumers wait for a producer that died to be
                started again, once all others have closed.
            deadline_s: How long the actor may take to start.
        """
        (queue,) = cls.create_many(
            max_items,
            [name],
            num_producers=num_producers,
            redeliver=redeliver,
            producer_return_s=producer_return_s,
            deadline_s=deadline_s,
        )
        return queue

    @classmethod
    def create_many(
        cls,
        max_items: int,
        names: Sequence[str],
        *,
        num_producers: int = 1,
        redeliver: bool = False,
        producer_return_s: float = 0.0,
        beside: BoundedQueue | None = None,
        deadline_s: float = 60.0,
    ) -> list[BoundedQueue]:
        """Make several queues in one actor; else like `create`.

        Args:
            max_items: As of `create`, for each; so are those that are not named here.
            names: One for each queue.
            num_producers: See `create`.
            redeliver: See `create`.
            producer_return_s: See `create`.
            beside: A queue whose actor takes these too, which starts no process and
                so takes milliseconds; None: a new actor.
            deadline_s: See `create`.
        """
        require_positive("max_items", max_items)
        require_positive("num_producers", num_producers)
        if producer_return_s < 0:
            raise BatchError(
                f"producer_return_s must not be negative: got {producer_return_s}"
            )
        until_s = time.monotonic() + deadline_s
        if beside is None:
            actor: Any = _HostActor
            # Needs no CPU, as it only waits. Never restarted, as that would silently
            # lose its items.
            host = actor.options(num_cpus=0, max_restarts=0).remote()
        else:
            host = beside._host
        settings = (max_items, num_producers, redeliver, producer_return_s)
        queues = [cls(name, host, uuid.uuid4().hex) for name in names]
        # All requests go out before the first wait, so they share the actor's start-up.
        opened = [queue._send("open", *settings) for queue in queues]
        for queue, call in zip(queues, opened, strict=True):
            queue._call(call, max(until_s - time.monotonic(), 0.0))
        return queues

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy another client."""
        return type(self), (self.name, self._host, self._key)

    def register(self, name: str, *, deadline_s: float = 60.0) -> None:
        """Put items as the producer of this name from now on.

        The queue does not end before this producer has closed, whatever `num_producers`
        is. A restarted producer that registers under the same name continues as the one
        that died. Workers of a group are known by group and rank without it.

        Args:
            name: Of the producer; each has another one.
            deadline_s: How long the actor of the queue may take to answer.
        """
        self._introduce()
        self._call(self._send("register", self._client, name), deadline_s)

    def put(self, item: Any, *, deadline_s: float = 60.0) -> None:
        """Put one item, when there is room.

        Args:
            item: Anything that can be pickled; it must not hold object references.
            deadline_s: How long to wait for room.

        Raises:
            QueueClosedError: This client, or all producers, have closed.
            DeadlineExceededError: The queue stayed full; the item was not put.
            WorkerDiedError: The actor of the queue is gone.
        """
        self.put_many([item], deadline_s=deadline_s)

    def put_many(self, items: Sequence[Any], *, deadline_s: float = 60.0) -> None:
        """Put items in order, as room comes up. Raises like `put`.

        The message of a `DeadlineExceededError` says how many were put.
        """
        self.put_packed([_packed(item) for item in items], deadline_s=deadline_s)

    def put_packed(self, items: list[Any], *, deadline_s: float = 60.0) -> None:
        """Put values as they are, such as object references, to be got by `get_packed`.

        Ray unpickles them in the actor of the queue. Raises like `put_many`.
        """
        self._introduce()
        until_s = time.monotonic() + deadline_s
        done = 0
        while done < len(items):
            wait_s = min(_SLICE_S, max(until_s - time.monotonic(), 0.0))
            call = self._send("put", self._client, items[done:], wait_s)
            accepted, closed = self._call(call, wait_s + _GRACE_S)
            done += accepted
            if done < len(items) and closed:
                raise QueueClosedError(
                    f"queue {self.name!r} is closed: {len(items) - done} of "
                    f"{len(items)} items were not put"
                )
            if done < len(items) and time.monotonic() >= until_s:
                raise DeadlineExceededError(
                    f"queue {self.name!r} had no room for {deadline_s:g} s: "
                    f"{len(items) - done} of {len(items)} items were not put; are its "
                    "consumers alive?"
                )

    def get(self, *, deadline_s: float = 60.0) -> Any:
        """Return the next item.

        Tensors in it can lie in memory that others read (see `BatchedDataDict`).

        Raises:
            QueueClosedError: All producers have closed, and all items are taken.
            DeadlineExceededError: No item came in time.
            WorkerDiedError: The actor of the queue, or a producer that had not closed,
                is gone.
        """
        return self.get_many(1, deadline_s=deadline_s)[0]

    def get_many(self, max_items: int, *, deadline_s: float = 60.0) -> list[Any]:
        """Up to `max_items` items, once there is at least one. Raises like `get`."""
        require_positive("max_items", max_items)
        packed = self.get_packed(max_items, deadline_s=deadline_s)
        return [_unpacked(item) for item in packed]

    def get_packed(self, max_items: int, *, deadline_s: float = 60.0) -> list[Any]:
        """Up to `max_items` values that `put_packed` put. Raises like `get`."""
        self._introduce()
        until_s = time.monotonic() + deadline_s
        while True:
            # Tried at least once, even past the deadline, for an item
            # that is already there.
            wait_s = min(_SLICE_S, max(until_s - time.monotonic(), 0.0))
            call = self._send("get", self._client, max_items, wait_s)
            answer: Answer = self._call(call, wait_s + _GRACE_S)
            if answer.state == "items":
                return answer.items
            if answer.state == "closed":
                raise QueueClosedError(
                    f"queue {self.name!r} is closed and all its items are taken"
                )
            if answer.state == "broken":
                raise WorkerDiedError(
                    f"queue {self.name!r} ends early: {answer.detail} died before "
                    "closing it; all items that it had put are taken"
                )
            if time.monotonic() >= until_s:
                raise DeadlineExceededError(
                    f"queue {self.name!r} gave no item for {deadline_s:g} s "
                    f"({answer.detail})"
                )

    def __iter__(self) -> Iterator[Any]:
        """Items until all producers have closed; each is waited for like `get`."""
        while True:
            try:
                item = self.get()
            except QueueClosedError:
                return
            yield item

    def confirm(self, *, deadline_s: float = 60.0) -> None:
        """Confirm that this client has finished the items that it got."""
        self._call(self._send("confirm", self._client), deadline_s)

    def qsize(self, *, deadline_s: float = 60.0) -> int:
        """Return the number of items that wait."""
        return int(self._call(self._send("qsize"), deadline_s))

    def close(self, *, deadline_s: float = 60.0) -> None:
        """Declare that this client puts no more items; a second call has no effect."""
        self._introduce()
        self._call(self._send("close", self._client), deadline_s)

    def shutdown(self) -> None:
        """End the queue; its items are lost, and waiting calls raise an error.

        The actor ends with the last of its queues.
        """
        try:
            left = self._call(self._send("drop"), _GRACE_S)
        except WorkerDiedError:
            return
        # An actor that no longer answers is of no use to its other queues either.
        except DeadlineExceededError:
            left = 0
        if left == 0:
            ray.kill(self._host)

    def _introduce(self) -> None:
        """Have the actor watch this process, if it is an actor too."""
        if self._is_known:
            return
        self._is_known = True
        context = ray.get_runtime_context()
        actor = context.get_actor_id()
        # Tasks and drivers cannot be pinged, so their deaths stay unknown.
        if actor is None:
            return
        own = process_label()
        origin = ClientOrigin(
            producer=f"actor {actor}" if own is None else own.role_id,
            process=context.get_worker_id(),
            label=f"actor {actor} (node {context.get_node_id()}, pid {os.getpid()})"
            if own is None
            else str(own),
        )
        handle = context.current_actor
        self._call(self._send("watch", self._client, origin, handle), _GRACE_S)

    def _send(self, method: str, *args: Any) -> Any:
        """Have the actor call a method of this queue."""
        return getattr(self._host, method).remote(self._key, *args)

    def _call(self, reference: Any, deadline_s: float) -> Any:
        try:
            return ray.get(reference, timeout=deadline_s)
        except GetTimeoutError as error:
            raise DeadlineExceededError(
                f"the actor of queue {self.name!r} did not answer within "
                f"{deadline_s:g} s; an item may be on its way"
            ) from error
        except RayTaskError as error:
            # Any other error inside the actor is a bug and should surface unchanged.
            if not isinstance(error.cause, QueueOverError):
                raise
            raise WorkerDiedError(
                f"queue {self.name!r} was shut down, and its items with it"
            ) from None
        except RayActorError as error:
            raise WorkerDiedError(
                f"the actor of queue {self.name!r} is gone, and its items with it: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error


@dataclass(frozen=True, slots=True)
class _Packed:
    """A pickled item, with its large buffers apart."""

    data: bytes
    buffers: list[NDArray[np.uint8]]


def _packed(item: Any) -> _Packed:
    buffers: list[pickle.PickleBuffer] = []
    # cloudpickle, because classes of items may be defined in a script or notebook.
    data = cloudpickle.dumps(item, protocol=5, buffer_callback=buffers.append)
    # As arrays, because Ray passes their memory out of band.
    arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return _Packed(data, arrays)


def _unpacked(item: _Packed) -> Any:
    return pickle.loads(item.data, buffers=item.buffers)


# One group of calls, because Ray gives each group an event loop of its own.
@ray.remote(max_concurrency=_MAX_WAITING)
class _HostActor:
    """Holds `QueueHost`s, each by its key."""

    def __init__(self) -> None:
        self._hosts: dict[str, QueueHost] = {}

    async def open(self, key: str, *args: Any) -> None:
        self._hosts[key] = QueueHost(*args)

    async def drop(self, key: str) -> int:
        """End a queue; return how many are left."""
        host = self._hosts.pop(key, None)
        if host is not None:
            await host.end()
        return len(self._hosts)

    def _host(self, key: str) -> QueueHost:
        if key not in self._hosts:
            raise QueueOverError
        return self._hosts[key]

    async def put(self, key: str, *args: Any) -> tuple[int, bool]:
        return await self._host(key).put(*args)

    async def get(self, key: str, *args: Any) -> Answer:
        return await self._host(key).get(*args)

    async def confirm(self, key: str, client: str) -> None:
        await self._host(key).confirm(client)

    async def close(self, key: str, client: str) -> None:
        await self._host(key).close(client)

    async def qsize(self, key: str) -> int:
        return self._host(key).qsize()

    async def register(self, key: str, client: str, name: str) -> None:
        await self._host(key).register(client, name)

    async def watch(
        self, key: str, client: str, origin: ClientOrigin, handle: Any
    ) -> None:
        async def ping() -> bool:
            """Wait until the actor is free, or known to be dead."""
            try:
                await handle.__ray_ready__.remote()
            # The connection is lost for now, but the actor may be alive.
            except ActorUnavailableError:
                return True
            except RayActorError:
                return False
            # Only a certain death may end a producer.
            except RayError:
                return True
            return True

        self._host(key).watch(client, origin, ping)
