"""A queue of parts of a batch, served by whichever replica has room.

```
parts -> queue -> the replica with the least to do -> result of the part
            ^                  | lost
            +------------------+   to another replica
```
A part leaves the running ones before its result is kept, and a lost replica's process
has ended before its parts go elsewhere: so no part is lost or answered twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

from rl_models.errors import GenerationError

__all__ = ["ReplicaLostError", "RowServer", "serve_parts"]

# Rows that crash their replica would otherwise take down one replica after the other.
_MOST_LOSSES = 3


class ReplicaLostError(Exception):
    """A replica that worked on a part is gone.

    Args:
        replica: Number of the replica.
        cause: Its failure.
    """

    def __init__(self, replica: int, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.replica = replica
        self.cause = cause


class RowServer(Protocol):
    """The server of parts: the replicas of a generation policy."""

    def take(self) -> int | None:
        """Return the replica of the next part; None: all are busy or away.

        It counts as busy with the part until `give`.
        """
        ...

    def give(self, replica: int) -> None:
        """Record that a part that was taken for a replica has left it."""
        ...

    def begin(self, part: int, replica: int) -> Hashable:
        """Hand a part to a replica; return a ticket for its result.

        Raises:
            ReplicaLostError: It is gone.
        """
        ...

    def finished(self, tickets: Collection[Hashable]) -> Sequence[Hashable]:
        """Return the tickets that have ended, after a short wait if none has."""
        ...

    def result(self, ticket: Hashable, replica: int) -> Any:
        """Return the result of a part that has ended.

        Raises:
            ReplicaLostError: The replica is gone.
        """
        ...

    def lost(self, error: ReplicaLostError) -> None:
        """Record that a replica is gone; may be called several times per loss."""
        ...

    def wait_for_replica(self) -> None:
        """Return once some replica may have room.

        Raises:
            GenerationError: There is none left.
        """
        ...


def serve_parts(num_parts: int, server: RowServer) -> list[Any]:
    """Return the results of all parts, in order.

    Raises:
        GenerationError: No replica is left, or a part has cost too many of them.
    """
    running: dict[Hashable, tuple[int, int]] = {}
    try:
        return _serve(num_parts, server, running)
    finally:
        # Where an error ends the call, nobody waits for the parts that still run.
        for _, replica in running.values():
            server.give(replica)


def _serve(
    num_parts: int, server: RowServer, running: dict[Hashable, tuple[int, int]]
) -> list[Any]:
    """Serve all parts.

    Args:
        num_parts: Their number.
        server: The replicas.
        running: Filled with part and replica of each ticket, while it runs.
    """
    waiting = deque(range(num_parts))
    results: dict[int, Any] = {}
    losses: Counter[int] = Counter()

    def give_back(part: int, error: ReplicaLostError) -> None:
        server.lost(error)
        losses[part] += 1
        if losses[part] >= _MOST_LOSSES:
            raise GenerationError(
                f"{losses[part]} replicas were lost one after the other while they "
                f"sampled the same rows (part {part} of {num_parts}); the last: "
                f"{error.cause}"
            ) from error.cause
        # To the front: the batch ends with its last part, and this one has waited the
        # longest.
        waiting.appendleft(part)

    while len(results) < num_parts:
        while waiting and (replica := server.take()) is not None:
            part = waiting.popleft()
            try:
                running[server.begin(part, replica)] = (part, replica)
            except BaseException as error:
                server.give(replica)
                if not isinstance(error, ReplicaLostError):
                    raise
                give_back(part, error)
        if not running:
            server.wait_for_replica()
            continue
        for ticket in server.finished(running.keys()):
            part, replica = running.pop(ticket)
            server.give(replica)
            try:
                results[part] = server.result(ticket, replica)
            except ReplicaLostError as error:
                give_back(part, error)
    return [results[part] for part in range(num_parts)]
