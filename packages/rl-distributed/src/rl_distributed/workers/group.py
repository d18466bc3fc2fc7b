"""`RayWorkerGroup`: the same class in many processes, called by the axes they lie on.

Shutdown order: the supervisor, the caller's clean-up method in every worker, then the
processes and their children, then the claim on the bundles. The cluster stays.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from rl_distributed.errors import ConfigError, DistributedError
from rl_distributed.process.closing import close_after
from rl_distributed.redaction import REDACTED, is_secret_variable
from rl_distributed.security.audit import audit, audited
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.calls import WorkerCalls
from rl_distributed.workers.dispatch import check_worker_ranks
from rl_distributed.workers.future import DEFAULT_DEADLINE_S, fetch
from rl_distributed.workers.launch import LaunchedWorker, WorkerLauncher
from rl_distributed.workers.layout import WorkerSeat, lay_out_workers
from rl_distributed.workers.policy import FailFast, FailurePolicy
from rl_distributed.workers.processes import end_processes
from rl_distributed.workers.supervise import GroupSupervisor

if TYPE_CHECKING:
    from types import TracebackType

    from ray.actor import ActorHandle

    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_distributed.failures.worker import WorkerHealth
    from rl_distributed.named_sharding import NamedSharding

__all__ = ["RayWorkerGroup"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class RayWorkerGroup(WorkerCalls):
    """Workers of one class on the bundles of a virtual cluster.

    Every worker has RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment before its class is imported, and `env_vars` from
    its first instruction. Of the caller's environment it has what its cluster was
    started with: `init_ray(pass_env=...)` of a local one, nothing of a running one.

    Args:
        cluster: where the workers run.
        remote_worker_builder: which class, and with which arguments; or only the
            class, or its path `"module.Class"`, where it takes no arguments.
        workers_per_node: bundles to use on each node; None: all.
        name_prefix: name of the group in messages; empty: the name of the class.
        bundle_indices_list: tied groups, each (placement group, bundles): one worker
            per bundle, the first of each tuple leads.
        sharding_annotations: named axes over the workers; ranks are worker indices.
        env_vars: environment variables of every worker.
        start_deadline_s: how long all workers together may take to come up.
        call_deadline_s: how long results are waited for where no deadline is given.
        failure_policy: what to do when a worker is killed or hangs: `FailFast`,
            `RestartWorker` or `RestartGroup`.

    Raises:
        ConfigError: what is to be a class is none.
        WorkerStartError: a worker did not come up; none is left then.
        ResourceInsufficientError: the cluster has no room.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder | str | type[Any],
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        start_deadline_s: float = 120.0,
        call_deadline_s: float = DEFAULT_DEADLINE_S,
        failure_policy: FailurePolicy | None = None,
    ) -> None:
        builder = RayWorkerBuilder.of(remote_worker_builder)
        self.cluster = cluster
        self.name = name_prefix or builder.class_name.rpartition(".")[2]
        self.sharding_annotations = sharding_annotations
        self.call_deadline_s = call_deadline_s
        self._plans = {}
        self._lock = threading.Lock()
        self._workers: list[LaunchedWorker] = []
        # The launcher has the same list: a seat moves where its node is lost.
        self._seats = lay_out_workers(
            cluster.slots(), workers_per_node, bundle_indices_list
        )
        if sharding_annotations is not None:
            check_worker_ranks(sharding_annotations, len(self._seats))
        bundles = [seat.bundle for seat in self._seats]
        self._launcher = WorkerLauncher(
            cluster,
            builder,
            self._seats,
            self.name,
            _checked_variables(env_vars),
            start_deadline_s,
        )
        cluster.claim(self.name, bundles)
        self._unclaim = weakref.finalize(self, cluster.unclaim, self.name, bundles)
        self._unclaim.atexit = False
        try:
            self._launch(failure_policy or FailFast())
        except BaseException:
            self._unclaim()
            raise
        description = self._workers[0].description
        self._methods = description.methods
        self._generators = description.generator_methods
        self._has_dynamic_methods = description.has_dynamic_methods

    def _launch(self, policy: FailurePolicy) -> None:
        address = _LOOPBACK
        if not self._launcher.is_local:
            address = ray.util.get_node_ip_address()
        self.supervisor = GroupSupervisor(self.name, policy, self._workers, address)
        self._unwatch = weakref.finalize(self, self.supervisor.watch.close)
        self._launcher.watch_target = self.supervisor.watch.target
        try:
            with audited("group.up", self.name, num_workers=len(self._seats)):
                self._workers += self._launcher.launch()
        except BaseException:
            self.supervisor.close()
            raise
        self.supervisor.expect(self._workers)

    # --- who is there -------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle]:
        """The Ray actors, by rank."""
        return [worker.handle for worker in self._workers]

    @property
    def seats(self) -> list[WorkerSeat]:
        """Where each worker runs, by rank."""
        return list(self._seats)

    @property
    def worker_pids(self) -> list[int]:
        """Process of each worker on its node, by rank."""
        return [worker.description.pid for worker in self._workers]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._seats)

    def incarnation(self, rank: int) -> int:
        """How many processes the worker of this rank has had before."""
        return self._workers[rank].incarnation

    def health(self) -> list[WorkerHealth]:
        """How each worker is, by rank: what it does, or why it is gone."""
        return self.supervisor.health()

    def recover(self) -> None:
        """Restart now what has failed, as the policy says; calls and waits do it too.

        Raises:
            WorkerError: there were too many restarts, or the workers do not come up.
        """
        self.supervisor.recover(self)

    def restart(self, ranks: Sequence[int]) -> list[int]:
        """Start failed workers again, whatever the policy says.

        For workers that do not talk to each other. With `FailFast` the others go on and
        can be called meanwhile, so whoever spreads work over the workers brings one of
        them back from a thread of its own. The new process has the state that its
        constructor makes.

        Args:
            ranks: which workers; those that have not failed are left alone.

        Returns:
            The ranks that were started again.

        Raises:
            WorkerStartError: one did not come up; none of them is left then.
            DeadlineExceededError: not in time.
        """
        return self.supervisor.restart(self._group, ranks)

    def end(self, ranks: Sequence[int], cause: str) -> None:
        """End workers that can do nothing more, as their peer has failed.

        Calls that need them raise `WorkerDiedError`; `restart` starts them again.

        Args:
            ranks: which workers; those that have failed are left alone.
            cause: why, for messages.
        """
        self.supervisor.end(ranks, cause)

    def find_seats(self, ranks: Sequence[int]) -> list[int]:
        """Look up on which nodes these workers go; for the supervisor.

        Returns:
            The ranks that no node has room for now.
        """
        return self._launcher.find_seats(ranks)

    def relaunch(self, ranks: Sequence[int]) -> list[LaunchedWorker]:
        """New processes for these ranks; for the supervisor, which puts them in place.

        Raises:
            WorkerStartError: one did not come up; none of them is left then.
        """
        with audited("group.restart", self.name, ranks=list(ranks)):
            return self._launcher.launch(ranks)

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The first worker of each tied group; every worker where none are tied."""
        return [seat.rank for seat in self._seats if seat.leads_with is not None]

    @property
    def dp_size(self) -> int:
        """Number of tied groups."""
        return len(self.dp_leader_worker_indices)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The worker that leads tied group `dp_shard_idx`."""
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(
                f"group {self.name!r} has {len(leaders)} tied groups: got index "
                f"{dp_shard_idx}"
            )
        return leaders[dp_shard_idx]

    # --- the end ------------------------------------------------------------------

    def shutdown(
        self,
        cleanup_method: str | None = None,
        timeout: float = 30.0,
        force: bool = False,
    ) -> bool:
        """End all workers, and what they started; may be called more than once.

        Args:
            cleanup_method: called in every worker first.
            timeout: how long the clean-up, and then the end, may take.
            force: skip the clean-up. So does a cluster that was shut down before, which
                has ended the workers.

        Returns:
            True if the clean-up succeeded everywhere and no process is left.
        """
        with self._lock:
            # The supervisor has the same list.
            workers = list(self._workers)
            self._workers.clear()
        if not workers:
            return True
        self.supervisor.close()
        clean = True
        try:
            force = force or self.cluster.is_shut_down
            if cleanup_method is not None and not force:
                clean = self._clean_up(workers, cleanup_method, timeout)
        finally:
            gone = end_processes(workers, timeout)
            self._unclaim()
            audit("group.shutdown", self.name, clean=clean, gone=gone)
        return clean and gone

    def _clean_up(
        self, workers: Sequence[LaunchedWorker], method_name: str, timeout: float
    ) -> bool:
        references = [worker.handle.call.remote(method_name) for worker in workers]
        try:
            fetch(references, f"clean-up {method_name!r} of {self.name!r}", timeout)
        except DistributedError as error:
            logger.warning("%s", error)
            return False
        return True

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(error, self.shutdown, f"worker group {self.name!r}")

    def __repr__(self) -> str:
        state = f"{len(self._workers)} workers" if self._workers else "shut down"
        return f"RayWorkerGroup({self.name!r}, {state})"


def _checked_variables(env_vars: Mapping[str, str] | None) -> dict[str, str]:
    """A copy, so that nothing here ever changes the caller's mapping."""
    variables = dict(env_vars or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            shown = REDACTED if is_secret_variable(str(name)) else repr(value)
            raise ConfigError(
                f"env_vars must map names to strings: got {name!r}: {shown} "
                f"({type(value).__name__})"
            )
    return variables
