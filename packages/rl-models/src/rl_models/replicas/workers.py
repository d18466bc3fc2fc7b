"""The workers of replicas: one each, or several that hold one model together.

They form a grid with the axes data_parallel (replicas) x tensor_parallel (the workers
of one replica, on neighbouring bundles). All workers of a replica get the same calls in
the same order, because they meet in the collectives of the model. The rows of the first
one are the replica's, and the loss of one is the loss of all.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError, WorkerDiedError
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.generation.replica_rank import ReplicaRank

__all__ = ["ReplicaCall", "ReplicaWorkers", "replica_layout"]

_AXES = ("data_parallel", "tensor_parallel")
_LOOPBACK = "127.0.0.1"
# How long the others may go on with a call in which one of them has raised an error.
_ALONE_S = 5.0


def replica_layout(
    cluster: RayVirtualCluster, num_replicas: int | None, size: int
) -> dict[str, Any]:
    """Return the placement of replicas, as arguments of a worker group.

    Args:
        cluster: The cluster.
        num_replicas: Number of replicas; None: as many as there is room for.
        size: Workers per replica.

    Raises:
        ConfigError: There are too few bundles, or no whole number of replicas.
    """
    counts = list(cluster.bundle_counts)
    if sum(counts) % size:
        raise ConfigError(
            "generation.vllm.tensor_parallel_size must divide the number of bundles of "
            f"the generation cluster: got {size} with {sum(counts)}; change either"
        )
    room = sum(counts) // size
    if num_replicas is None:
        num_replicas = room
    elif num_replicas > room:
        raise ConfigError(
            f"generation.num_replicas must not exceed the bundles of the cluster"
            f"{f' by {size} for each' if size > 1 else ''}: got "
            f"{num_replicas} with {sum(counts)}; lower it, or enlarge the cluster."
        )
    grid = np.arange(num_replicas * size).reshape(num_replicas, size)
    layout: dict[str, Any] = {"sharding_annotations": NamedSharding(grid, _AXES)}
    if size > 1:
        layout["bundle_indices_list"] = _tied(cluster, size)[:num_replicas]
    else:
        layout["workers_per_node"] = _fill_nodes(counts, num_replicas)
    return layout


def _tied(cluster: RayVirtualCluster, size: int) -> list[tuple[int, list[int]]]:
    try:
        return cluster.tied_bundles(size)
    except ConfigError as error:
        raise ConfigError(
            "generation.vllm.tensor_parallel_size must divide the bundles of every "
            f"node, unless the cluster is unified: got {size} with "
            f"{list(cluster.bundle_counts)}; {error}"
        ) from error


def _fill_nodes(counts: Sequence[int], wanted: int) -> list[int]:
    used: list[int] = []
    for count in counts:
        used.append(min(count, wanted - sum(used)))
    return used


class ReplicaCall:
    """A call of one replica that has begun.

    Args:
        replica: Number of the replica.
        references: Ray references of its workers' calls, by rank in the group.
        method: Name of the method, for messages.
    """

    def __init__(
        self, replica: int, references: Mapping[int, Any], method: str
    ) -> None:
        self.replica = replica
        self.references = references
        self.method = method
        self.first, *self.others = references.values()
        self.failure: BaseException | None = None
        """Failure of another worker than the first, which may wait for it."""


class ReplicaWorkers:
    """Calls replicas, and ends and restarts them as a whole.

    Args:
        group: Their workers, laid out by `replica_layout`.
        size: Workers of each replica.
    """

    def __init__(self, group: RayWorkerGroup, size: int) -> None:
        self.group = group
        self.size = size
        self._in_order = threading.Lock()

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.group.world_size // self.size

    def ranks(self, replica: int) -> list[int]:
        """Workers of a replica, by their ranks in the group."""
        return list(range(replica * self.size, (replica + 1) * self.size))

    def replica_of(self, rank: int) -> int:
        """Return the replica that a worker belongs to."""
        return rank // self.size

    def call(
        self,
        method: str,
        replica: int,
        *,
        own: Sequence[Mapping[str, Any]] | None = None,
        call_deadline_s: float | None = None,
        **kwargs: Any,
    ) -> ReplicaCall:
        """Call a method of all workers of a replica.

        Args:
            method: Which method.
            replica: Which replica.
            own: Further arguments of each of its workers.
            call_deadline_s: How long the call may take; None: no limit of its own.
            kwargs: Arguments of all of them.

        Raises:
            WorkerError: One of them is gone.
        """
        if self.size > 1:
            # Stored once for all workers and not once per call.
            kwargs = {
                name: ray.put(value) if isinstance(value, Mapping) else value
                for name, value in kwargs.items()
            }
        references = {}
        # If two callers' calls reached the workers of a replica in different orders,
        # the workers would wait for each other in different collectives.
        with self._in_order:
            for place, rank in enumerate(self.ranks(replica)):
                references[rank] = self.group.run_single_worker_single_data(
                    method,
                    rank,
                    call_deadline_s=call_deadline_s,
                    **kwargs,
                    **(own[place] if own else {}),
                )
        return ReplicaCall(replica, references, method)

    def finished(
        self, calls: Collection[ReplicaCall], timeout_s: float
    ) -> list[ReplicaCall]:
        """Return calls that have ended, by a result or a failure of any worker."""
        waited = {ref: call for call in calls for ref in (call.first, *call.others)}
        ready, _ = ray.wait(list(waited), num_returns=1, timeout=timeout_s)
        done = []
        for reference in ready:
            call = waited[reference]
            if reference == call.first or self._has_failed(call, reference):
                done.append(call)
        return done

    def _has_failed(self, call: ReplicaCall, reference: Any) -> bool:
        """Return whether a worker other than the first has failed in the call."""
        # Asked once: the next wait must not return for it again.
        call.others.remove(reference)
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            call.failure = error
        if call.failure is None:
            return False
        if not isinstance(call.failure, ray.exceptions.RayActorError):
            # An error in the rows is raised by all workers. Only if the first one does
            # not end, the failure is this worker's own.
            ended, _ = ray.wait([call.first], timeout=_ALONE_S)
            if ended:
                call.failure = None
        return True

    def results(self, call: ReplicaCall, timeout_s: float) -> list[Any]:
        """Return what each worker returned, of a call that has ended.

        Raises:
            DistributedError: Why one of them returned nothing; of a worker that is
                alone with a failure, `WorkerDiedError`.
        """
        is_alone = call.failure is not None
        if is_alone and not isinstance(call.failure, ray.exceptions.RayActorError):
            raise WorkerDiedError(
                f"a worker of generation replica {call.replica} failed while the "
                f"others were at work: {str(call.failure).strip()}"
            )
        found: dict[int, Any] = {}
        future = self.future(call.references, call.method)
        for outcome in future.outcomes(timeout_s):
            if outcome.error is not None:
                raise outcome.error
            found[outcome.rank] = outcome.value
        return [found[rank] for rank in call.references]

    def future(self, references: Mapping[int, Any], method: str) -> MultiWorkerFuture:
        """Return the future of calls of workers, given by rank."""
        ranks = list(references)
        calls = list(references.values())
        return MultiWorkerFuture(calls, ranks, ranks, method, self.group)

    def set_up(
        self,
        replicas: Sequence[int],
        config: Mapping[str, Any],
        context: Mapping[str, Any],
    ) -> list[ReplicaCall]:
        """Have replicas load their model; those that share one wait for each other.

        Args:
            replicas: Which.
            config: `GenerationConfig.to_dict()`.
            context: Keyword arguments of the backend's `setup`, of all of them.
        """
        places = self._places(replicas)
        return [
            self.call(
                "setup",
                replica,
                own=[
                    {"replica": replica, "context": {**context, **place}}
                    for place in places[replica]
                ],
                config=config,
            )
            for replica in replicas
        ]

    def _places(
        self, replicas: Sequence[int]
    ) -> dict[int, list[dict[str, ReplicaRank]]]:
        """Return where the workers of each replica meet, by rank.

        Nothing if a replica is a single worker.
        """
        if self.size == 1:
            return {replica: [{}] for replica in replicas}
        seats = self.group.seats
        firsts = [seats[self.ranks(replica)[0]] for replica in replicas]
        # A new port for each start: processes of the replica that was ended may still
        # hold the previous one.
        found = self.group.cluster.get_available_addresses_and_ports_batch(
            [seat.bundle for seat in firsts]
        )
        places: dict[int, list[dict[str, ReplicaRank]]] = {}
        for replica, (address, port) in zip(replicas, found, strict=True):
            nodes = {seats[rank].slot.node_id for rank in self.ranks(replica)}
            host = _LOOPBACK if len(nodes) == 1 else address
            places[replica] = [
                {"place": ReplicaRank(rank, self.size, host, port)}
                for rank in range(self.size)
            ]
        return places

    def restart(self, replica: int, cause: str) -> None:
        """End the remaining processes of a replica, and start all of them again.

        Raises:
            WorkerStartError: A process did not start.
            DeadlineExceededError: They did not start in time.
        """
        self.end(replica, cause)
        self.group.restart(self.ranks(replica))

    def lacks_node(self, replica: int) -> bool:
        """Return whether no node has room for one of its workers now."""
        lacking = self.group.ranks_without_node()
        return not set(lacking).isdisjoint(self.ranks(replica))

    def wait_for_nodes(self, replica: int) -> None:
        """Wait until nodes have room for a replica.

        Raises:
            WorkerDiedError: None had in the time that the failure policy gives.
        """
        self.group.wait_for_nodes(self.ranks(replica))

    @property
    def unplaced(self) -> list[int]:
        """Replicas that were not started, because a worker of theirs has no node."""
        gone = set(range(self.group.world_size)) - set(self.group.live_ranks)
        return sorted({self.replica_of(rank) for rank in gone})

    def end(self, replica: int, cause: str) -> None:
        """End the remaining workers of a replica: they depend on the lost one."""
        self.group.end(self.ranks(replica), cause)
