"""Parts of one `generate` call on the replicas of a group.

Shapes: R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_distributed.errors import WorkerDiedError, WorkerHungError
from rl_models.generation.row_checks import check_same_rows
from rl_models.replicas.load import ReplicaLoad
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
        load: Parts on the replicas, of all calls.
        calls: Arguments of the call of each part.
        calls_at_once: Number of parts that one replica gets at a time, of this call.
        deadline_s: How long one call may take before its replica is considered hung.
        restore: Sends weights to restarted replicas; called if no replica serves.
    """

    def __init__(
        self,
        workers: ReplicaWorkers,
        replicas: Replicas,
        load: ReplicaLoad,
        calls: Sequence[Mapping[str, Any]],
        *,
        calls_at_once: int,
        deadline_s: float,
        restore: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._replicas = replicas
        self._load = load
        self._own_R = np.zeros(workers.num_replicas, np.int64)
        """[R] parts of this call on each replica."""
        self._serving_R: npt.NDArray[np.bool_] | None = None
        """[R] whether each replica serves; None: to be asked again."""
        self._calls = calls
        self._calls_at_once = calls_at_once
        self._deadline_s = deadline_s
        self._restore = restore

    def take(self) -> int | None:
        """Return the serving replica with the fewest parts, if it takes one more.

        The parts of all calls count; only those of this one are limited, as others may
        be short where this one's are long.
        """
        if self._serving_R is None:
            # Once for all parts that are handed out together: one that is lost
            # meanwhile refuses its part.
            self._serving_R = np.zeros(len(self._own_R), np.bool_)
            self._serving_R[self._replicas.serving] = True
        has_room_R = self._own_R < self._calls_at_once
        replica = self._load.take(self._serving_R & has_room_R)
        if replica is not None:
            self._own_R[replica] += 1
        return replica

    def give(self, replica: int) -> None:
        """Note that a part has left a replica."""
        self._own_R[replica] -= 1
        self._load.give(replica)

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

    def finished(self, tickets: Collection[Any]) -> Sequence[Hashable]:
        """Return calls that have ended; those of a lost worker end with its process."""
        self._serving_R = None
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
        self._serving_R = None
        self._replicas.lose(error.replica, error.cause)

    def wait_for_replica(self) -> None:
        """Wait until a replica serves; restarted ones get weights if none does."""
        self._serving_R = None
        if not self._replicas.wait_for_one():
            self._restore()
