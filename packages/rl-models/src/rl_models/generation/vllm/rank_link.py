"""Calls from the first rank of a replica to the others, in the same order for all.

```
rank 0 --(number, method, arguments)--> every other rank, in its order
       <--(number, ok, result)--------- each of them
```
A connection that ends means that the rank behind it has ended; both sides notice at
once, whatever they are doing.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rl_models.generation.vllm.rank_meeting import greet_leader, link_of, meet, shut

__all__ = ["FollowersEnd", "LeadersEnd"]

_MEET_S = 300.0


class LeadersEnd:
    """The end of rank 0, which the others connect to.

    Args:
        address: Address of this machine.
        on_loss: Called in a thread when a rank is gone.
    """

    def __init__(self, address: str, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss
        self._server = socket.create_server((address, 0))
        # Messages are pickles, which can run any code: nobody else may connect.
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._links: list[tuple[Connection[Any, Any], queue.Queue[Any]]] = []
        self._is_closed = False

    @property
    def ticket(self) -> tuple[str, int, bytes]:
        """Address, port and secret that another rank needs to connect."""
        address, port = self._server.getsockname()[:2]
        return address, port, self._secret

    def accept(self, num_ranks: int, deadline_s: float = _MEET_S) -> None:
        """Wait until the given number of others have connected.

        Args:
            num_ranks: Number of the others.
            deadline_s: Limit for all of them together.

        Raises:
            TimeoutError: Some did not connect in time.
        """
        found = meet(self._server, self._secret, num_ranks, deadline_s=deadline_s)
        # By rank, because vLLM expects results in this order.
        for rank, connection in sorted(found.items()):
            # A thread per rank reads all the time: this is how an end is noticed even
            # while no answer is due.
            replies: queue.Queue[Any] = queue.Queue()
            self._links.append((connection, replies))
            threading.Thread(
                target=self._read,
                args=(rank, connection, replies),
                name="rank-replies",
                daemon=True,
            ).start()

    def _read(
        self, rank: int, connection: Connection[Any, Any], replies: queue.Queue[Any]
    ) -> None:
        with suppress(EOFError, OSError):
            while True:
                replies.put(connection.recv())
        if not self._is_closed:
            self._on_loss(f"rank {rank} of the replica has ended")

    def send(self, method: Any, args: tuple[Any, ...], kwargs: Any) -> int:
        """Call a method of all others and return the number of the call."""
        number = next(self._numbers)
        # Pickled once for all ranks: the plan of a step can be large.
        message = pickle.dumps((number, method, args, kwargs), protocol=5)
        for connection, _ in self._links:
            connection.send_bytes(message)
        return number

    def results(self, number: int, timeout_s: float | None) -> list[Any]:
        """Return what each of the others returned.

        Raises:
            RuntimeError: One of them failed.
            TimeoutError: One did not answer in time.
        """
        return [self._result(replies, number, timeout_s) for _, replies in self._links]

    def _result(
        self, replies: queue.Queue[Any], number: int, timeout_s: float | None
    ) -> Any:
        while True:
            try:
                answered, is_right, value = replies.get(timeout=timeout_s)
            except queue.Empty:
                raise TimeoutError(
                    f"a rank did not answer within {timeout_s} s"
                ) from None
            if answered != number:
                continue  # the answer to a call that failed here before it was awaited
            if not is_right:
                raise RuntimeError(f"another rank failed: {value}")
            return value

    def end(self, method: str) -> None:
        """Call a last method of all others, which may end from now on."""
        self._is_closed = True  # first: from here on an end is no loss
        with suppress(OSError):
            self.send(method, (), {})

    def close(self) -> None:
        """End the connections."""
        self._is_closed = True
        for connection, _ in self._links:
            shut(connection)


class FollowersEnd:
    """The connection of another rank to rank 0.

    Args:
        rank: The rank of this process.
        ticket: The ticket of rank 0.
        on_loss: Called in a thread when rank 0 is gone.
    """

    def __init__(
        self,
        rank: int,
        ticket: tuple[str, int, bytes],
        on_loss: Callable[[str], None],
    ) -> None:
        address, port, secret = ticket
        self._on_loss = on_loss
        self._is_closed = False
        self._calls: queue.Queue[Any] = queue.Queue()
        self._connection = link_of(
            socket.create_connection((address, port), timeout=_MEET_S)
        )
        greet_leader(self._connection, secret, rank, _MEET_S)
        threading.Thread(target=self._read, name="rank-calls", daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._calls.put(pickle.loads(self._connection.recv_bytes()))
        self._calls.put(None)  # ends `calls`, which waits for another
        if not self._is_closed:
            self._on_loss("rank 0 of the replica has ended")

    def calls(self) -> Iterator[tuple[int, Any, tuple[Any, ...], Any]]:
        """Yield number, method and arguments of each call, until the link ends."""
        while (call := self._calls.get()) is not None:
            yield call

    def answer(self, number: int, is_right: bool, value: Any) -> None:
        """Send the result of a call, or how it failed."""
        # The thread that reads notices that rank 0 is gone, and reports it.
        with suppress(OSError):
            self._connection.send((number, is_right, value))

    def close(self) -> None:
        """End the connection; rank 0 may end from now on."""
        self._is_closed = True
        shut(self._connection)
