"""Parts of one `generate` call on the replicas of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from rl_distributed.errors import WorkerDiedError, WorkerHungError
from rl_models.generation.row_checks import check_same_rows
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.row_queue import ReplicaLostError
from rl_models.replicas.workers import ReplicaWorkers

__all__ = ["ReplicaServer"]

_METHOD = "generate"
_LOOK_S = 0.5
_FETCH_S = 600.0
_LOSSES = (WorkerDiedError, WorkerHungError)


class ReplicaServer:
    """Hands parts to replicas as calls of their workers.

    Args:
        workers: Workers of the replicas.
        replicas: State of the replicas.
        calls: Arguments of the call of each part.
        calls_at_once: Calls that one replica takes at a time.
        deadline_s: How long one call may take before its replica is considered hung.
        restore: Sends weights to restarted replicas; called if no replica serves.
    """

    def __init__(
        self,
        workers: ReplicaWorkers,
        replicas: Replicas,
        calls: Sequence[Mapping[str, Any]],
        *,
        calls_at_once: int,
        deadline_s: float,
        restore: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._replicas = replicas
        self._calls = calls
        self._calls_at_once = calls_at_once
        self._deadline_s = deadline_s
        self._restore = restore

    def room(self, running: Counter[int]) -> int | None:
        """Return the serving replica with the fewest parts, if it takes one more."""
        serving = self._replicas.serving
        if not serving:
            return None
        least = min(serving, key=lambda rank: (running[rank], rank))
        return least if running[least] < self._calls_at_once else None

    def begin(self, part: int, replica: int) -> Hashable:
        """Call the worker."""
        try:
            return self._workers.call(
                _METHOD,
                replica,
                call_deadline_s=self._deadline_s,
                **self._calls[part],
            )
        except _LOSSES as error:
            raise ReplicaLostError(replica, error) from error

    def finished(self, tickets: Sequence[Any]) -> Sequence[Hashable]:
        """Return calls that have ended; those of a lost worker end with its process."""
        return self._workers.finished(tickets, _LOOK_S)

    def result(self, ticket: Any, replica: int) -> Any:
        """Return the rows that the call returned.

        Raises:
            ReplicaLostError: The replica is gone.
            GenerationError: Its workers do not agree.
            WorkerError: What the backend raised.
        """
        try:
            output, *digests = self._workers.results(ticket, _FETCH_S)
        except _LOSSES as error:
            raise ReplicaLostError(replica, error) from error
        check_same_rows(output, digests, replica)
        return output

    def lost(self, error: ReplicaLostError) -> None:
        """Have the replica started again."""
        self._replicas.lose(error.replica, error.cause)

    def wait_for_replica(self) -> None:
        """Wait until a replica serves; restarted ones get weights if none does."""
        if not self._replicas.wait_for_one():
            self._restore()
