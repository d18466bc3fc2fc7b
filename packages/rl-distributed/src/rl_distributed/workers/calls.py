"""`WorkerCalls`: the calls of a group, and what is sent to whom.

Data flow of one call: the caller's arguments -> a plan of slices (`dispatch`) -> one
Ray call per worker (`host`) -> a future -> results in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import ObjectRef

from rl_distributed.errors import (
    ConfigError,
    ShardingError,
    WorkerError,
    WorkerMethodError,
)
from rl_distributed.logs.logging import portable_log_context
from rl_distributed.suggestion import did_you_mean
from rl_distributed.workers.call_deadline import add_call_deadline
from rl_distributed.workers.dispatch import (
    CallPlan,
    check_given_once,
    check_nested_lengths,
    merged_kwargs,
    per_worker_kwargs,
    pick_slice,
    plan_rank_zero_call,
    plan_sharded_call,
)
from rl_distributed.workers.future import (
    CallReferences,
    MultiWorkerFuture,
    WorkerResult,
    end_of,
)
from rl_distributed.workers.launch import LaunchedWorker, shared_argument

if TYPE_CHECKING:
    from rl_distributed.named_sharding import NamedSharding
    from rl_distributed.workers.group import RayWorkerGroup
    from rl_distributed.workers.supervise import GroupSupervisor

__all__ = ["WorkerCalls"]

Axes = Sequence[str] | None


class WorkerCalls:
    """The calls of a `RayWorkerGroup`, which adds the life of the workers.

    `call_deadline_s` of each call is counted from now on, also while the call waits for
    others before it. A worker that is past it is taken for hung: it is ended, who waits
    gets `WorkerHungError` with the method and all ranks that are late, and the group's
    policy says what follows.

    References among the arguments are handed on as they are: their values go from
    worker to worker without passing through here.

    Arguments of the worker's method are given by name. Those whose name a call has
    itself, such as `method_name` or `call_deadline_s`, go into `common_kwargs`, or
    `split_kwargs` where each worker gets its own.
    """

    name: str
    sharding_annotations: NamedSharding | None
    supervisor: GroupSupervisor
    _workers: list[LaunchedWorker]
    _methods: frozenset[str]
    _generators: frozenset[str]
    _has_dynamic_methods: bool
    _plans: dict[tuple[Any, ...], CallPlan]

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
        if not 0 <= worker_idx < len(self._workers):
            self._check_up(method_name)
            raise IndexError(
                f"group {self.name!r} has workers 0 to {len(self._workers) - 1}: got "
                f"worker_idx {worker_idx}"
            )
        self._check_call(method_name, (worker_idx,), call_deadline_s)
        context = portable_log_context()
        arguments = merged_kwargs("common_kwargs", common_kwargs, kwargs)
        reference = self._submit(worker_idx, method_name, arguments, context)
        self._limit(method_name, (worker_idx,), [reference], call_deadline_s)
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
        called = self._called(method_name, run_rank_0_only_axes, call_deadline_s)
        split = merged_kwargs("split_kwargs", split_kwargs, kwargs)
        common = self._common(common_kwargs, split, len(called))
        own = per_worker_kwargs(split, len(called))
        return self._send(
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
        called = self._called(method_name, run_rank_0_only_axes, call_deadline_s)
        arguments = merged_kwargs("common_kwargs", common_kwargs, kwargs)
        common = self._common(arguments, {}, len(called))
        return self._send(method_name, called, [common] * len(called), call_deadline_s)

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
        self._check_up(method_name)
        plan = self._plan(
            in_sharded_axes,
            replicate_on_axes,
            output_is_replicated,
            make_dummy_calls_to_free_axes,
        )
        self._check_call(method_name, plan.called_workers, call_deadline_s)
        split = merged_kwargs("split_kwargs", split_kwargs, kwargs)
        for name, value in split.items():
            check_nested_lengths(name, value, plan.axis_sizes, plan.axes)
        common = self._common(common_kwargs, split, len(plan.called_workers))
        sent = self._send(
            method_name,
            plan.called_workers,
            self._slices(plan, common, split),
            call_deadline_s,
        )
        return MultiWorkerFuture(
            list(sent),
            list(plan.return_from_workers),
            list(plan.called_workers),
            method_name,
            self._group,
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
            self._group, return_generators_as_proxies, deadline_s
        )

    def iter_results(
        self,
        future: MultiWorkerFuture | Sequence[Any],
        *,
        ordered: bool = True,
        deadline_s: float | None = None,
    ) -> Iterator[WorkerResult]:
        """Results of a call one by one, while the workers go on.

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
        """The future of a call that returned references, to iterate or cancel it."""
        if isinstance(references, MultiWorkerFuture):
            return references
        if isinstance(references, CallReferences):
            return MultiWorkerFuture(
                list(references),
                None,
                list(references.called_workers),
                references.method_name,
                self._group,
                references.repeat,
            )
        return MultiWorkerFuture(list(references), group=self._group)

    # --- inside a call ------------------------------------------------------------

    @property
    def _group(self) -> RayWorkerGroup:
        return self  # type: ignore[return-value]

    def _check_up(self, method_name: str) -> None:
        if not self._workers:
            raise WorkerError(
                f"group {self.name!r} was shut down; method {method_name!r} cannot run"
            )
        if method_name not in self._methods and not self._has_dynamic_methods:
            raise WorkerMethodError(
                f"the workers of group {self.name!r} have no method {method_name!r}"
                f"{did_you_mean(method_name, self._methods)}"
            )

    def _check_call(
        self, method_name: str, ranks: Sequence[int], call_deadline_s: float | None
    ) -> None:
        self._check_up(method_name)
        if call_deadline_s is not None and not call_deadline_s > 0:
            raise ConfigError(
                f"call_deadline_s must be positive: got {call_deadline_s}"
            )
        if self.supervisor.incident is not None:
            what = f"method {method_name!r} of group {self.name!r}"
            self.supervisor.check(self._group, ranks, what)

    def _called(
        self,
        method_name: str,
        run_rank_0_only_axes: Axes,
        call_deadline_s: float | None,
    ) -> Sequence[int]:
        called = plan_rank_zero_call(
            self.sharding_annotations, len(self._workers), run_rank_0_only_axes
        )
        self._check_call(method_name, called, call_deadline_s)
        return called

    def _send(
        self,
        method_name: str,
        called: Sequence[int],
        arguments: Sequence[Mapping[str, Any]],
        call_deadline_s: float | None,
    ) -> CallReferences:
        context = portable_log_context()
        references = CallReferences(
            [
                self._submit(worker, method_name, kwargs, context)
                for worker, kwargs in zip(called, arguments, strict=True)
            ],
            method_name,
            called,
        )
        self._limit(method_name, called, references, call_deadline_s)
        retries = self.supervisor.policy.retries(method_name)
        if retries and method_name not in self._generators:
            references.repeat = self._repeater(
                method_name, called, arguments, call_deadline_s
            )
        return references

    def _submit(
        self,
        worker: int,
        method_name: str,
        kwargs: Mapping[str, Any],
        context: Mapping[str, Any] | None,
    ) -> Any:
        handle = self._workers[worker].handle
        if method_name in self._generators:
            return handle.stream.remote(method_name, context, **kwargs)
        # Ray resolves references only among the arguments themselves, not inside one.
        for value in kwargs.values():
            if isinstance(value, ObjectRef):
                return handle.call.remote(method_name, context, **kwargs)
        return handle.call_packed.remote((method_name, kwargs, context))

    def _repeater(
        self,
        method_name: str,
        called: Sequence[int],
        arguments: Sequence[Mapping[str, Any]],
        call_deadline_s: float | None,
    ) -> Callable[[int], Any]:
        context = portable_log_context()

        def repeat(place: int) -> Any:
            worker = called[place]
            reference = self._submit(worker, method_name, arguments[place], context)
            self._limit(method_name, (worker,), [reference], call_deadline_s)
            return reference

        return repeat

    def _limit(
        self,
        method_name: str,
        called: Sequence[int],
        references: Sequence[Any],
        call_deadline_s: float | None,
    ) -> None:
        """Have the supervisor end the workers that are late."""
        if call_deadline_s is None:
            return
        if not call_deadline_s > 0:
            raise ConfigError(
                f"call_deadline_s must be positive: got {call_deadline_s}"
            )
        add_call_deadline(
            self.supervisor.watch,
            f"method {method_name!r} of group {self.name!r}",
            {
                end_of(reference): (worker, self._workers[worker].incarnation)
                for worker, reference in zip(called, references, strict=True)
            },
            call_deadline_s,
        )

    def _common(
        self,
        common: Mapping[str, Any] | None,
        others: Mapping[str, Any],
        num_calls: int,
    ) -> dict[str, Any]:
        common = common or {}
        if others:
            check_given_once("common_kwargs", common, others)
        if num_calls == 1:
            return dict(common)
        return {name: shared_argument(value) for name, value in common.items()}

    @staticmethod
    def _slices(
        plan: CallPlan, common: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The arguments of each called worker; equal slices are stored once."""
        shares = plan.shares_slices
        made: dict[tuple[int, ...] | None, dict[str, Any]] = {
            None: {**common, **dict.fromkeys(kwargs)}
        }
        for place in plan.slices:
            if place not in made:
                made[place] = dict(common)
                for name, value in kwargs.items():
                    leaf = pick_slice(value, place or ())
                    made[place][name] = shared_argument(leaf) if shares else leaf
        return [made[place] for place in plan.slices]

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
