"""`RayWorkerGroup`: one class in many processes, addressed by named axes.

Shutdown order: the supervisor, the caller's clean-up method in every worker, then the
processes and their children, then the claim on the bundles. The cluster stays.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

import ray
from ray import ObjectRef
from typing_extensions import TypeVar

from rl_distributed.errors import (
    ConfigError,
    DistributedError,
    ResourceInsufficientError,
)
from rl_distributed.logs.logging import portable_log_context
from rl_distributed.process.closing import close_after
from rl_distributed.redaction import REDACTED, is_secret_variable
from rl_distributed.security.audit import audit, audited
from rl_distributed.workers.argument_split import (
    check_nested_lengths,
    check_worker_ranks,
    merged_kwargs,
    per_worker_kwargs,
)
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.calls import Axes, CallSender
from rl_distributed.workers.future import CallReferences, MultiWorkerFuture
from rl_distributed.workers.launch import LaunchedWorker, WorkerLauncher
from rl_distributed.workers.layout import WorkerSeat, lay_out_workers
from rl_distributed.workers.policy import FailFast, FailurePolicy, Restart
from rl_distributed.workers.processes import end_processes, is_stopped
from rl_distributed.workers.supervise import GroupSupervisor
from rl_distributed.workers.thread_count import crowding
from rl_distributed.workers.typed_calls import (
    AllCalls,
    EachCalls,
    OneCalls,
    ShardedCalls,
)
from rl_distributed.workers.wait import DEFAULT_DEADLINE_S, WorkerResult, fetch

if TYPE_CHECKING:
    from types import TracebackType

    from ray.actor import ActorHandle

    from rl_distributed.actor_environments import ActorEnvironment
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_distributed.failures.worker import WorkerHealth
    from rl_distributed.named_sharding import NamedSharding

__all__ = ["RayWorkerGroup"]

logger = logging.getLogger(__name__)

# Where nothing says which class the workers have, their calls are not checked.
W = TypeVar("W", default=Any)

_LOOPBACK = "127.0.0.1"


class RayWorkerGroup(Generic[W]):
    """Workers of one class on the bundles of a virtual cluster.

    Every worker has RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment before its class is imported, and `env_vars` from
    its first instruction. Of the caller's environment it has what its cluster was
    started with: `init_ray(pass_env=...)` of a local one, nothing of a running one.

    `call_deadline_s` of each call counts from the call on, also while it waits for
    others before it. A worker that exceeds it is considered hung and is terminated;
    callers waiting on it get `WorkerHungError` with the method and all late ranks, and
    the group's policy says what follows.

    References among the arguments are handed on as they are: their values go from
    worker to worker without passing through here.

    Arguments of the worker's method are given by name. Those whose name a call has
    itself, such as `method_name` or `call_deadline_s`, go into `common_kwargs`, or
    `split_kwargs` where each worker gets its own.

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
        start_deadline_s: how long all workers together may take to start.
        call_deadline_s: default deadline of waits for results.
        failure_policy: reaction to a worker that dies or hangs: `FailFast`,
            `RestartWorker` or `RestartGroup`.
        environment: the Python environment of the workers; None: that of the builder,
            or else the one that the class declares.

    Raises:
        ConfigError: the worker is neither a class nor the path of one.
        WorkerStartError: a worker did not start; all others are ended.
        ResourceInsufficientError: the cluster has no room.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder | str | type[W],
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        start_deadline_s: float = 120.0,
        call_deadline_s: float = DEFAULT_DEADLINE_S,
        failure_policy: FailurePolicy | None = None,
        environment: ActorEnvironment | None = None,
    ) -> None:
        builder = RayWorkerBuilder.of(remote_worker_builder)
        if environment is not None:
            builder = builder.with_options(environment=environment)
        self.cluster = cluster
        self.name = name_prefix or builder.class_name.rpartition(".")[2]
        self.sharding_annotations = sharding_annotations
        self.call_deadline_s = call_deadline_s
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
        # Claimed before a process is started: two groups that take the same share of a
        # bundle would fail late, by what Ray says.
        cluster.claim(self.name, bundles)
        self._unclaim = weakref.finalize(self, cluster.unclaim, self.name, bundles)
        # At the end of the program the cluster goes as a whole.
        self._unclaim.atexit = False
        try:
            self._launch(failure_policy or FailFast())
        except BaseException:
            self._unclaim()
            raise
        self._sender = CallSender(
            self.name,
            self._workers,
            self._workers[0].description,
            self.supervisor,
            sharding_annotations,
        )

    def _launch(self, policy: FailurePolicy) -> None:
        # A firewall of the machine lets this pass, and nobody else on the network can
        # reach it.
        address = _LOOPBACK
        if not self._launcher.is_local:
            address = ray.util.get_node_ip_address()
        # A weak reference, so that the supervisor does not keep an unused group alive.
        group = weakref.ref(self)

        def restore(ranks: Sequence[int]) -> None:
            called = group()
            if called is not None and isinstance(policy, Restart) and policy.on_restart:
                policy.on_restart(called, ranks)

        self.supervisor = GroupSupervisor(
            self.name, policy, self._workers, self._launcher, address, restore
        )
        # A group that is dropped without `shutdown` must not leak its watch's thread.
        self._unwatch = weakref.finalize(self, self.supervisor.watch.close)
        # Before the launch: workers connect to the watch as they start.
        self._launcher.watch_target = self.supervisor.watch.target
        try:
            absent = self._ranks_without_node(policy)
            present = [s.rank for s in self._seats if s.rank not in absent]
            with audited("group.up", self.name, num_workers=len(present)):
                up = self._launcher.launch(present)
        except BaseException:
            self.supervisor.close()
            raise
        by_rank = {worker.seat.rank: worker for worker in up}
        for seat in self._seats:
            worker = by_rank.get(seat.rank) or LaunchedWorker.to_come(seat, up[0])
            self._workers.append(worker)
        self.supervisor.expect(up)
        self.supervisor.note_unplaced([self._workers[rank] for rank in absent])

    def _ranks_without_node(self, policy: FailurePolicy) -> list[int]:
        """Return the workers to start later, as the policy allows."""
        ranks = range(len(self._seats))
        if policy.on_node_lost == "shrink":
            absent = self._launcher.find_seats(ranks)
        else:
            absent = [seat.rank for seat in self._seats if not seat.slot.node_id]
        least = policy.min_workers if policy.on_node_lost == "shrink" else len(ranks)
        if len(ranks) - len(absent) < least:
            raise ResourceInsufficientError(
                f"group {self.name!r} needs {least} workers, and cluster "
                f"{self.cluster.name!r} has a node for "
                f"{len(ranks) - len(absent)} of {len(ranks)} now; add nodes, or let "
                "it start with fewer (on_node_lost='shrink', min_workers)"
            )
        return absent

    # --- the workers --------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle]:
        """The Ray actors, by rank, of those that were started."""
        return [worker.actor for worker in self._workers if worker.actor is not None]

    @property
    def live_ranks(self) -> list[int]:
        """The workers that are up; all of them unless some have failed."""
        gone = self.supervisor.gone
        return [seat.rank for seat in self._seats if seat.rank not in gone]

    def ranks_without_node(self) -> list[int]:
        """Return the workers that no node has room for now, as after a loss."""
        return self.supervisor.room.lacking(range(self.world_size))

    def wait_for_nodes(self, ranks: Sequence[int]) -> None:
        """Wait until a node has room for each of these workers.

        Raises:
            WorkerDiedError: none had in the time that the failure policy gives.
        """
        self.supervisor.room.wait(ranks)

    @property
    def seats(self) -> list[WorkerSeat]:
        """The seat of each worker, by rank."""
        return list(self._seats)

    @property
    def worker_pids(self) -> list[int]:
        """Process of each worker on its node, by rank."""
        return [worker.description.pid for worker in self._workers]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._seats)

    def warn_of_crowding(self, num_threads: int | None, key: str) -> None:
        """Log a warning if the workers' threads outnumber the cores of a node.

        Args:
            num_threads: Threads that each worker computes with; None: not known.
            key: Name of that setting in the user's configuration.
        """
        places = [
            (worker.seat.slot.address, worker.description.num_cores)
            for worker in self._workers
        ]
        found = num_threads and crowding(self.name, places, num_threads, key)
        if found:
            logger.warning("%s", found)

    def incarnation(self, rank: int) -> int:
        """Return the number of processes that this rank has had before."""
        return self._workers[rank].incarnation

    def health(self) -> list[WorkerHealth]:
        """Return the state of each worker, by rank: its method, or why it is gone."""
        return self.supervisor.health()

    def recover(self) -> None:
        """Restart failed workers now, as the policy says; calls and waits do so too.

        Raises:
            WorkerError: there were too many restarts, or the workers do not start.
        """
        self.supervisor.recover()

    def restart(self, ranks: Sequence[int]) -> list[int]:
        """Restart failed workers, whatever the policy says.

        For workers that do not talk to each other. With `FailFast` the others keep
        running and can be called meanwhile, so a caller that spreads work over the
        workers can restart one from a separate thread. The new process has only the
        state that its constructor creates.

        Args:
            ranks: which workers; those that have not failed are left alone.

        Returns:
            The ranks that were restarted.

        Raises:
            WorkerStartError: one did not start; all of them are ended.
            DeadlineExceededError: they did not start in time.
        """
        return self.supervisor.restart(ranks)

    def end(self, ranks: Sequence[int], cause: str) -> None:
        """End workers that are of no use any more because a peer has failed.

        Calls that need them raise `WorkerDiedError`; `restart` starts them again.

        Args:
            ranks: which workers; those that have failed are left alone.
            cause: why, for messages.
        """
        self.supervisor.end(ranks, cause)

    @property
    def dp_leader_worker_indices(self) -> list[int]:
        """The first worker of each tied group; every worker where none are tied."""
        return [seat.rank for seat in self._seats if seat.leads_with is not None]

    @property
    def dp_size(self) -> int:
        """Number of tied groups."""
        return len(self.dp_leader_worker_indices)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the worker that leads tied group `dp_shard_idx`."""
        leaders = self.dp_leader_worker_indices
        if not 0 <= dp_shard_idx < len(leaders):
            raise IndexError(
                f"group {self.name!r} has {len(leaders)} tied groups: got index "
                f"{dp_shard_idx}"
            )
        return leaders[dp_shard_idx]

    # --- calls --------------------------------------------------------------------

    @property
    def all(self) -> AllCalls[W]:
        """Calls of every worker with the same arguments: `group.all.run(lr=0.1)`."""
        return AllCalls(self)

    @property
    def each(self) -> EachCalls[W]:
        """Calls of every worker with its own item of each list."""
        return EachCalls(self)

    def __getitem__(self, rank: int) -> OneCalls[W]:
        """Return the calls of one worker: `group[0].run(lr=0.1)`.

        Raises:
            IndexError: there is no such worker.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(
                f"group {self.name!r} has workers 0 to {self.world_size - 1}: got rank "
                f"{rank}"
            )
        return OneCalls(self, _rank=rank)

    def sharded(
        self,
        *axes: str,
        replicate: Sequence[str] = (),
        same_output: Sequence[str] = (),
        common: Mapping[str, Any] | None = None,
    ) -> ShardedCalls[W]:
        """Return calls whose arguments are split along named axes.

        Args:
            *axes: along which the arguments are split, the first one outermost.
            replicate: axes along which every coordinate gets the same slice.
            same_output: axes along which all results are the same; only coordinate 0
                answers.
            common: arguments that are the same for all.
        """
        return ShardedCalls(
            self,
            _axes=axes,
            _replicate=tuple(replicate),
            _same_output=tuple(same_output),
            _common=common,
        )

    def call_workers(
        self,
        method_name: str,
        ranks: Sequence[int] | None,
        arguments: Mapping[str, Any],
        call_deadline_s: float | None = None,
    ) -> MultiWorkerFuture:
        """Call a method of some workers with the same arguments.

        Args:
            method_name: which method.
            ranks: of the workers; None: all.
            arguments: of the method, by name.
            call_deadline_s: how long the call may take; None: no limit of its own.
        """
        called = range(len(self._workers)) if ranks is None else ranks
        self._sender.check_call(method_name, called, call_deadline_s)
        common = self._sender.common(arguments, {}, len(called))
        each = [common] * len(called)
        return self.future_of(
            self._sender.send(method_name, called, each, call_deadline_s)
        )

    def run_single_worker_single_data(
        self,
        method_name: str,
        worker_idx: int,
        *,
        common_kwargs: Mapping[str, Any] | None = None,
        call_deadline_s: float | None = None,
        **kwargs: Any,
    ) -> ObjectRef[Any]:
        """Call a method of one worker; returns Ray's reference to its result.

        Args:
            method_name: which method.
            worker_idx: rank of the worker.
            common_kwargs: further arguments of the method.
            call_deadline_s: how long the call may take; None: no limit of its own.
            kwargs: arguments of the method.
        """
        # After a shutdown there are no workers; `check_up` then gives the better error.
        if not 0 <= worker_idx < len(self._workers):
            self._sender.check_up(method_name)
            raise IndexError(
                f"group {self.name!r} has workers 0 to {len(self._workers) - 1}: got "
                f"worker_idx {worker_idx}"
            )
        self._sender.check_call(method_name, (worker_idx,), call_deadline_s)
        context = portable_log_context()
        arguments = merged_kwargs("common_kwargs", common_kwargs, kwargs)
        reference = self._sender.submit(worker_idx, method_name, arguments, context)
        self._sender.limit(method_name, (worker_idx,), [reference], call_deadline_s)
        return reference

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Axes = None,
        common_kwargs: Mapping[str, Any] | None = None,
        split_kwargs: Mapping[str, Sequence[Any]] | None = None,
        call_deadline_s: float | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers, each with its own item of every list.

        Args:
            method_name: which method.
            run_rank_0_only_axes: axes along which only coordinate 0 is called.
            common_kwargs: arguments that are the same for all.
            split_kwargs: further lists like those of `kwargs`.
            call_deadline_s: how long the call may take; None: no limit of its own.
            kwargs: lists with one item for each worker that is called.
        """
        called = self._sender.called(method_name, run_rank_0_only_axes, call_deadline_s)
        split = merged_kwargs("split_kwargs", split_kwargs, kwargs)
        common = self._sender.common(common_kwargs, split, len(called))
        own = per_worker_kwargs(split, len(called))
        return self._sender.send(
            method_name,
            called,
            [{**common, **arguments} for arguments in own],
            call_deadline_s,
        )

    def run_all_workers_single_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Axes = None,
        common_kwargs: Mapping[str, Any] | None = None,
        call_deadline_s: float | None = None,
        **kwargs: Any,
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers with the same arguments.

        Args:
            method_name: which method.
            run_rank_0_only_axes: axes along which only coordinate 0 is called.
            common_kwargs: further arguments of the method.
            call_deadline_s: how long the call may take; None: no limit of its own.
            kwargs: arguments of the method.
        """
        called = self._sender.called(method_name, run_rank_0_only_axes, call_deadline_s)
        arguments = merged_kwargs("common_kwargs", common_kwargs, kwargs)
        common = self._sender.common(arguments, {}, len(called))
        return self._sender.send(
            method_name, called, [common] * len(called), call_deadline_s
        )

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: Axes = None,
        replicate_on_axes: Axes = None,
        output_is_replicated: Axes = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        split_kwargs: Mapping[str, Any] | None = None,
        call_deadline_s: float | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call a method with arguments that are split along named axes.

        Args:
            method_name: which method.
            in_sharded_axes: axes along which the arguments are split. Each argument is
                a list with one item for each coordinate of the first axis, these again
                lists for the second axis, and so on.
            replicate_on_axes: axes along which every coordinate gets the same slice.
            output_is_replicated: axes along which all results are the same; only
                coordinate 0 answers.
            make_dummy_calls_to_free_axes: on all other axes only coordinate 0 is
                called; this calls the others too, with None for each of `kwargs`.
            common_kwargs: arguments that are the same for all.
            split_kwargs: further split arguments.
            call_deadline_s: how long the call may take; None: no limit of its own.
            kwargs: the split arguments.

        Raises:
            ShardingError: axes are unknown or contradictory, lists have other lengths,
                or the group has no named axes.
        """
        self._sender.check_up(method_name)
        plan = self._sender.plan(
            in_sharded_axes,
            replicate_on_axes,
            output_is_replicated,
            make_dummy_calls_to_free_axes,
        )
        self._sender.check_call(method_name, plan.called_workers, call_deadline_s)
        split = merged_kwargs("split_kwargs", split_kwargs, kwargs)
        for name, value in split.items():
            check_nested_lengths(name, value, plan.axis_sizes, plan.axes)
        common = self._sender.common(common_kwargs, split, len(plan.called_workers))
        sent = self._sender.send(
            method_name,
            plan.called_workers,
            self._sender.slices(plan, common, split),
            call_deadline_s,
        )
        return MultiWorkerFuture(
            list(sent),
            list(plan.return_from_workers),
            list(plan.called_workers),
            method_name,
            self,
            sent.repeat,
        )

    def get_all_worker_results(
        self,
        future: MultiWorkerFuture | Sequence[Any],
        return_generators_as_proxies: bool = False,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Wait for the results of a call, in the order of the workers.

        Args:
            future: what a call returned; a list of references is fine as well.
            return_generators_as_proxies: return generators of references instead of
                their items.
            deadline_s: how long to wait; None: `call_deadline_s` of the group.

        Raises:
            Error: like `MultiWorkerFuture.get_results`.
        """
        return self.future_of(future).get_results(
            self, return_generators_as_proxies, deadline_s
        )

    def iter_results(
        self,
        future: MultiWorkerFuture | Sequence[Any],
        *,
        ordered: bool = True,
        deadline_s: float | None = None,
    ) -> Iterator[WorkerResult]:
        """Yield results of a call one by one, while the workers continue.

        Args:
            future: what a call returned; a list of references is fine as well.
            ordered: all of one worker before those of the next; False: as they come.
            deadline_s: how long all of them together may take; None: `call_deadline_s`
                of the group.

        Raises:
            Error: like `MultiWorkerFuture.get_results`.
        """
        return self.future_of(future).iter_results(
            ordered=ordered, deadline_s=deadline_s
        )

    def future_of(
        self, references: MultiWorkerFuture | Sequence[Any]
    ) -> MultiWorkerFuture:
        """Make a future of a call that returned references, to iterate or cancel it."""
        if isinstance(references, MultiWorkerFuture):
            return references
        if isinstance(references, CallReferences):
            return MultiWorkerFuture(
                list(references),
                None,
                list(references.called_workers),
                references.method_name,
                self,
                references.repeat,
            )
        return MultiWorkerFuture(list(references), group=self)

    # --- the end ------------------------------------------------------------------

    def shutdown(
        self,
        cleanup_method: str | None = None,
        timeout: float = 30.0,
        force: bool = False,
    ) -> bool:
        """End all workers and their child processes; may be called more than once.

        Args:
            cleanup_method: called first in every worker that is up.
            timeout: how long the clean-up, and then the end, may take.
            force: skip the clean-up. So does a cluster that was shut down before, which
                has ended the workers.

        Returns:
            True if the clean-up succeeded everywhere and no process is left. Workers
            that `end` has ended need none; others that have failed missed it.
        """
        with self._lock:
            # The supervisor has the same list.
            workers = list(self._workers)
            self._workers.clear()
        if not workers:
            return True
        # Close it first, so that the ends below do not count as failures to restart.
        self.supervisor.close()
        clean = True
        try:
            force = force or self.cluster.is_shut_down
            if cleanup_method is not None and not force:
                clean = self._clean_up(workers, cleanup_method, timeout)
        finally:
            gone = end_processes(workers, timeout)
            # Last, because another group may take the bundles from here on.
            self._unclaim()
            audit("group.shutdown", self.name, clean=clean, gone=gone)
        return clean and gone

    def _clean_up(
        self, workers: Sequence[LaunchedWorker], method_name: str, timeout: float
    ) -> bool:
        gone = self.supervisor.gone
        # A call to a dead worker would fail the clean-up of all the others, and one to
        # a stopped worker would use up their time.
        up = [
            worker
            for worker in workers
            if worker.seat.rank not in gone and not is_stopped(worker)
        ]
        references = [worker.handle.call.remote(method_name) for worker in up]
        try:
            fetch(references, f"clean-up {method_name!r} of {self.name!r}", timeout)
        except DistributedError as error:
            logger.warning("%s", error)
            return False
        if len(up) + len(gone) < len(workers):
            return False
        kinds = {failure.kind for failure in gone.values()}
        return kinds <= {"released", "unplaced"}

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
    """Return a copy, so that nothing here ever changes the caller's mapping."""
    variables = dict(env_vars or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            shown = REDACTED if is_secret_variable(str(name)) else repr(value)
            raise ConfigError(
                f"env_vars must map names to strings: got {name!r}: {shown} "
                f"({type(value).__name__})"
            )
    return variables
