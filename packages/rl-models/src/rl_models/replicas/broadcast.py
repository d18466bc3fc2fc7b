"""Calls of one method on several replicas, some of which may be lost meanwhile.

A replica that is lost is left to `Replicas`, which restarts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rl_distributed.errors import (
    DeadlineExceededError,
    DistributedError,
    WorkerDiedError,
    WorkerHungError,
)
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.workers import ReplicaWorkers

__all__ = ["Broadcast", "but_losses", "raise_first"]

_LOSSES = (WorkerDiedError, WorkerHungError)
# Results that have arrived when time is up are still collected.
_SHORTEST_S = 0.001


class Broadcast:
    """Calls workers of replicas by their ranks, and collects their answers.

    Args:
        workers: Workers of the replicas.
        replicas: State of the replicas.
    """

    def __init__(self, workers: ReplicaWorkers, replicas: Replicas) -> None:
        self.workers = workers
        self.replicas = replicas

    @property
    def live_ranks(self) -> list[int]:
        """Workers of replicas that can load weights; waits if there are none."""
        live = self.replicas.live or self.replicas.settle()
        return [rank for replica in live for rank in self.workers.ranks(replica)]

    def call(
        self, method: str, own: Mapping[int, Mapping[str, Any]], **common: Any
    ) -> dict[int, Any]:
        """Call workers; one that is lost by now is left out with its replica.

        Args:
            method: Name of the method.
            own: Arguments of each worker, by rank.
            common: Arguments of all workers.

        Returns:
            A Ray reference by rank.
        """
        calls: dict[int, Any] = {}
        for replica in dict.fromkeys(map(self.workers.replica_of, own)):
            ranks = self.workers.ranks(replica)
            try:
                call = self.workers.call(
                    method, replica, own=[own[rank] for rank in ranks], **common
                )
            except _LOSSES as error:
                self.replicas.lose(replica, error)
            else:
                calls.update(call.references)
        return calls

    def results(
        self, method: str, calls: Mapping[int, Any], deadline_s: float
    ) -> tuple[dict[int, Any], list[DistributedError]]:
        """Wait for all calls; return results by rank, and the failures of others."""
        results: dict[int, Any] = {}
        failures: list[DistributedError] = []
        late: list[int] = []
        left_s = max(deadline_s, _SHORTEST_S)
        for outcome in self.workers.future(calls, method).outcomes(left_s):
            error = outcome.error
            if error is None:
                results[outcome.rank] = outcome.value
            elif isinstance(error, DeadlineExceededError):
                # Gathered into one error: the ranks of a replica are late together.
                late.append(outcome.rank)
            else:
                failures.append(error)
            if isinstance(error, _LOSSES):
                self.replicas.lose(self.workers.replica_of(outcome.rank), error)
        if late:
            named = dict.fromkeys(map(self.workers.replica_of, sorted(late)))
            failures.append(
                DeadlineExceededError(
                    f"generation replica {', '.join(map(str, named))} did not end "
                    f"{method!r} within {deadline_s:.3g} s"
                )
            )
        # In the order of the replicas, not in that of their answers.
        return dict(sorted(results.items())), failures

    def whole(self, ranks: Iterable[int]) -> list[int]:
        """Replicas all of whose workers are among these."""
        counts = Counter(map(self.workers.replica_of, ranks))
        return [replica for replica, n in counts.items() if n == self.workers.size]


def but_losses(failures: list[DistributedError]) -> list[DistributedError]:
    """Leave out lost replicas, which `Replicas` takes care of."""
    return [error for error in failures if not isinstance(error, _LOSSES)]


def raise_first(failures: list[DistributedError]) -> None:
    """Raise the first failure, if there is any."""
    if failures:
        raise failures[0]
