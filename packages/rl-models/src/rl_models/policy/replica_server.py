"""Parts of one `generate` call on the replicas of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import ray

from rl_distributed.errors import DistributedError, WorkerDiedError, WorkerHungError
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.policy.replicas import Replicas
from rl_models.policy.row_queue import ReplicaLostError

__all__ = ["ReplicaServer"]

_METHOD = "generate"
_LOOK_S = 0.5
_FETCH_S = 600.0
_LOSSES = (WorkerDiedError, WorkerHungError)


class ReplicaServer:
    """Hands parts to replicas as calls of their workers.

    Args:
        group: The workers.
        replicas: Which of them serve.
        calls: Arguments of the call of each part.
        calls_at_once: Calls that one replica takes at a time.
        deadline_s: How long one call may take before its replica is taken for hung.
        restore: Gives weights to replicas that came back; called where nobody serves.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        replicas: Replicas,
        calls: Sequence[Mapping[str, Any]],
        *,
        calls_at_once: int,
        deadline_s: float,
        restore: Callable[[], None],
    ) -> None:
        self._group = group
        self._replicas = replicas
        self._calls = calls
        self._calls_at_once = calls_at_once
        self._deadline_s = deadline_s
        self._restore = restore

    def room(self, running: Counter[int]) -> int | None:
        """The serving replica with the fewest parts, if it takes one more."""
        serving = self._replicas.serving
        if not serving:
            return None
        least = min(serving, key=lambda rank: (running[rank], rank))
        return least if running[least] < self._calls_at_once else None

    def begin(self, part: int, replica: int) -> Hashable:
        """Call the worker."""
        try:
            reference: Hashable = self._group.run_single_worker_single_data(
                _METHOD,
                replica,
                call_deadline_s=self._deadline_s,
                **self._calls[part],
            )
        except _LOSSES as error:
            raise ReplicaLostError(replica, error) from error
        return reference

    def finished(self, tickets: Sequence[Hashable]) -> Sequence[Hashable]:
        """Calls that have ended; those of a lost worker end with its process."""
        ready, _ = ray.wait(list(tickets), num_returns=1, timeout=_LOOK_S)
        done: list[Hashable] = ready
        return done

    def result(self, ticket: Any, replica: int) -> Any:
        """What the call returned."""
        try:
            return ray.get(ticket, timeout=_FETCH_S)
        except ray.exceptions.RayError as error:
            explained = self._explained(error, ticket)
        if isinstance(explained, _LOSSES):
            raise ReplicaLostError(replica, explained)
        raise explained

    def _explained(self, error: BaseException, ticket: Any) -> DistributedError:
        what = f"method {_METHOD!r} of group {self._group.name!r}"
        supervisor = self._group.supervisor
        return supervisor.explain(error, what, [ticket], _METHOD)

    def lost(self, error: ReplicaLostError) -> None:
        """Have the replica started again."""
        self._replicas.lose(error.replica, error.cause)

    def wait_for_replica(self) -> None:
        """Until a replica serves; those that came back get weights if nobody does."""
        if not self._replicas.wait_for_one():
            self._restore()
