"""`RayWorkerGroup`: the same class in many processes, called by the axes they lie on.

Data flow of one call: the caller's arguments -> a plan of slices (`dispatch`) -> one
Ray call per worker (`host`) -> a future -> results in the order of the workers.

Shutdown order: the caller's clean-up method in every worker, then the processes and
their children, then the claim on the cluster's bundles. The cluster stays.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import ObjectRef

from rl_distributed.errors import (
    ConfigError,
    DistributedError,
    ShardingError,
    WorkerError,
    WorkerMethodError,
)
from rl_distributed.suggestion import did_you_mean
from rl_distributed.workers.dispatch import (
    CallPlan,
    check_nested_lengths,
    check_worker_ranks,
    per_worker_kwargs,
    pick_slice,
    plan_rank_zero_call,
    plan_sharded_call,
)
from rl_distributed.workers.future import DEFAULT_DEADLINE_S, MultiWorkerFuture, fetch
from rl_distributed.workers.launch import (
    LaunchedWorker,
    WorkerLauncher,
    end_processes,
    shared_argument,
)
from rl_distributed.workers.layout import WorkerSeat, lay_out_workers

if TYPE_CHECKING:
    from types import TracebackType

    from ray.actor import ActorHandle

    from rl_distributed.named_sharding import NamedSharding
    from rl_distributed.virtual_cluster import RayVirtualCluster
    from rl_distributed.workers.builder import RayWorkerBuilder

__all__ = ["RayWorkerGroup"]

logger = logging.getLogger(__name__)

Axes = Sequence[str] | None


class RayWorkerGroup:
    """Workers of one class on the bundles of a virtual cluster.

    Every worker has RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment before its class is imported, and `env_vars` from
    its first instruction; nothing else of the caller's environment is handed on.

    Args:
        cluster: where the workers run.
        remote_worker_builder: which class, and with which arguments.
        workers_per_node: bundles to use on each node; None: all.
        name_prefix: name of the group in messages; empty: the name of the class.
        bundle_indices_list: tied groups, each (placement group, bundles): one worker
            per bundle, the first of each tuple leads.
        sharding_annotations: named axes over the workers; ranks are worker indices.
        env_vars: environment variables of every worker.
        start_deadline_s: how long all workers together may take to come up.
        call_deadline_s: how long results are waited for where no deadline is given.

    Raises:
        WorkerStartError: a worker did not come up; none is left then.
        ResourceInsufficientError: the cluster has no room.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        start_deadline_s: float = 120.0,
        call_deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        self.cluster = cluster
        self.name = name_prefix or remote_worker_builder.class_name.rpartition(".")[2]
        self.sharding_annotations = sharding_annotations
        self.call_deadline_s = call_deadline_s
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        self._lock = threading.Lock()
        self._workers: list[LaunchedWorker] = []
        self._seats = lay_out_workers(
            cluster.slots(), workers_per_node, bundle_indices_list
        )
        if sharding_annotations is not None:
            check_worker_ranks(sharding_annotations, len(self._seats))
        bundles = [seat.bundle for seat in self._seats]
        launcher = WorkerLauncher(
            cluster,
            remote_worker_builder,
            self._seats,
            self.name,
            _checked_variables(env_vars),
            start_deadline_s,
        )
        cluster.claim(self.name, bundles)
        self._unclaim = weakref.finalize(self, cluster.unclaim, self.name, bundles)
        self._unclaim.atexit = False
        try:
            self._workers = launcher.launch()
        except BaseException:
            self._unclaim()
            raise
        description = self._workers[0].description
        self._methods = description.methods
        self._generators = description.generator_methods
        self._has_dynamic_methods = description.has_dynamic_methods

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

    # --- calls --------------------------------------------------------------------

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, **kwargs: Any
    ) -> ObjectRef[Any]:
        """Call a method of one worker; returns Ray's reference to its result.

        References among the arguments are handed on as they are, here and in all other
        calls: their values go from worker to worker without passing through here.
        """
        self._check_call(method_name)
        if not 0 <= worker_idx < len(self._workers):
            raise IndexError(
                f"group {self.name!r} has workers 0 to {len(self._workers) - 1}: got "
                f"worker_idx {worker_idx}"
            )
        return self._submit(worker_idx, method_name, kwargs)

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Axes = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers, each with its own item of every list.

        Args:
            method_name: which method.
            run_rank_0_only_axes: axes along which only coordinate 0 is called.
            common_kwargs: arguments that are the same for all.
            kwargs: lists with one item for each worker that is called.
        """
        self._check_call(method_name)
        called = self._called(run_rank_0_only_axes)
        common = self._common(common_kwargs, kwargs, len(called))
        own = per_worker_kwargs(kwargs, len(called))
        return [
            self._submit(worker, method_name, {**common, **arguments})
            for worker, arguments in zip(called, own, strict=True)
        ]

    def run_all_workers_single_data(
        self, method_name: str, *, run_rank_0_only_axes: Axes = None, **kwargs: Any
    ) -> list[ObjectRef[Any]]:
        """Call a method of all workers with the same arguments.

        Args:
            method_name: which method.
            run_rank_0_only_axes: axes along which only coordinate 0 is called.
            kwargs: arguments of the method.
        """
        self._check_call(method_name)
        called = self._called(run_rank_0_only_axes)
        common = self._common(kwargs, {}, len(called))
        return [self._submit(worker, method_name, common) for worker in called]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: Axes = None,
        replicate_on_axes: Axes = None,
        output_is_replicated: Axes = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
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
            kwargs: the split arguments.

        Raises:
            ShardingError: axes are unknown or contradictory, lists have other lengths,
                or the group has no named axes.
        """
        self._check_call(method_name)
        plan = self._plan(
            in_sharded_axes,
            replicate_on_axes,
            output_is_replicated,
            make_dummy_calls_to_free_axes,
        )
        for name, value in kwargs.items():
            check_nested_lengths(name, value, plan.axis_sizes, plan.axes)
        common = self._common(common_kwargs, kwargs, len(plan.called_workers))
        slices: dict[tuple[int, ...] | None, dict[str, Any]] = {
            None: dict.fromkeys(kwargs)
        }
        futures = []
        for worker, place in zip(plan.called_workers, plan.slices, strict=True):
            if place not in slices:
                slices[place] = {
                    name: self._leaf(pick_slice(value, place or ()), plan)
                    for name, value in kwargs.items()
                }
            futures.append(
                self._submit(worker, method_name, {**common, **slices[place]})
            )
        return MultiWorkerFuture(
            futures,
            list(plan.return_from_workers),
            list(plan.called_workers),
            method_name,
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
        """
        if not isinstance(future, MultiWorkerFuture):
            future = MultiWorkerFuture(list(future))
        return future.get_results(self, return_generators_as_proxies, deadline_s)

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
            force: skip the clean-up.

        Returns:
            True if the clean-up succeeded everywhere and no process is left.
        """
        with self._lock:
            workers, self._workers = self._workers, []
        if not workers:
            return True
        clean = True
        try:
            if cleanup_method is not None and not force:
                clean = self._clean_up(workers, cleanup_method, timeout)
        finally:
            gone = end_processes(workers, timeout)
            self._unclaim()
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
        self.shutdown()

    def __repr__(self) -> str:
        state = f"{len(self._workers)} workers" if self._workers else "shut down"
        return f"RayWorkerGroup({self.name!r}, {state})"

    # --- inside a call ------------------------------------------------------------

    def _check_call(self, method_name: str) -> None:
        if not self._workers:
            raise WorkerError(
                f"group {self.name!r} was shut down; method {method_name!r} cannot run"
            )
        if method_name not in self._methods and not self._has_dynamic_methods:
            raise WorkerMethodError(
                f"the workers of group {self.name!r} have no method {method_name!r}"
                f"{did_you_mean(method_name, self._methods)}"
            )

    def _submit(self, worker: int, method_name: str, kwargs: Mapping[str, Any]) -> Any:
        handle = self._workers[worker].handle
        if method_name in self._generators:
            return handle.stream.remote(method_name, **kwargs)
        # Ray resolves references only among the arguments themselves, not inside one.
        if any(isinstance(value, ObjectRef) for value in kwargs.values()):
            return handle.call.remote(method_name, **kwargs)
        return handle.call_packed.remote((method_name, kwargs))

    def _called(self, run_rank_0_only_axes: Axes) -> list[int]:
        return plan_rank_zero_call(
            self.sharding_annotations, len(self._workers), run_rank_0_only_axes
        )

    def _common(
        self,
        common: Mapping[str, Any] | None,
        others: Mapping[str, Any],
        num_calls: int,
    ) -> dict[str, Any]:
        common = common or {}
        twice = sorted(set(common) & set(others))
        if twice:
            raise ShardingError(
                f"arguments {twice} are given both in common_kwargs and by themselves"
            )
        if num_calls == 1:
            return dict(common)
        return {name: shared_argument(value) for name, value in common.items()}

    @staticmethod
    def _leaf(value: Any, plan: CallPlan) -> Any:
        return shared_argument(value) if plan.shares_slices else value

    def _plan(
        self, split: Axes, copied: Axes, same_output: Axes, dummies: bool
    ) -> CallPlan:
        if self.sharding_annotations is None:
            raise ShardingError(
                f"group {self.name!r} was made without sharding_annotations, which "
                "run_all_workers_sharded_data needs; pass a NamedSharding when making "
                "the group"
            )
        key = (
            *(
                a if a is None or isinstance(a, str) else tuple(a)
                for a in (split, copied, same_output)
            ),
            dummies,
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_sharded_call(
                self.sharding_annotations, split, copied, same_output, dummies
            )
        return plan


def _checked_variables(env_vars: Mapping[str, str] | None) -> dict[str, str]:
    """A copy, so that nothing here ever changes the caller's mapping."""
    variables = dict(env_vars or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"env_vars must map names to strings: got {name!r}: {value!r} "
                f"({type(value).__name__})"
            )
    return variables
