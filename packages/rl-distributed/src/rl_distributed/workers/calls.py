"""`CallSender`: send the calls of a group to its workers.

Data flow of one call: the caller's arguments -> a plan of slices (`dispatch`) -> one
Ray call per worker (`host`) -> a future -> results in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import ObjectRef

from rl_distributed.errors import (
    ConfigError,
    ShardingError,
    WorkerError,
    WorkerMethodError,
)
from rl_distributed.logs.logging import portable_log_context
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.suggestion import did_you_mean
from rl_distributed.workers.argument_split import (
    CallPlan,
    check_given_once,
    pick_slice,
    plan_rank_zero_call,
    plan_sharded_call,
)
from rl_distributed.workers.call_deadline import add_call_deadline
from rl_distributed.workers.future import CallReferences
from rl_distributed.workers.host import WorkerDescription
from rl_distributed.workers.launch import LaunchedWorker, shared_argument
from rl_distributed.workers.supervise import GroupSupervisor
from rl_distributed.workers.wait import end_of

__all__ = ["Axes", "CallSender"]

Axes = Sequence[str] | None


class CallSender:
    """Sends the calls of a group to its workers.

    Args:
        name: of the group, for messages.
        workers: by rank; the list of the group, in which restarted workers change.
        description: methods of the workers' class.
        supervisor: of the group.
        sharding: named axes over the workers.
    """

    def __init__(
        self,
        name: str,
        workers: list[LaunchedWorker],
        description: WorkerDescription,
        supervisor: GroupSupervisor,
        sharding: NamedSharding | None,
    ) -> None:
        self._name = name
        self._workers = workers
        self._description = description
        self._supervisor = supervisor
        self._sharding = sharding
        self._plans: dict[tuple[Any, ...], CallPlan] = {}

    def check_up(self, method_name: str) -> None:
        """Raise unless the workers are running and have the method."""
        if not self._workers:
            raise WorkerError(
                f"group {self._name!r} was shut down; method {method_name!r} cannot run"
            )
        # A class with `__getattr__` may have methods that its attributes do not list.
        if (
            method_name not in self._description.methods
            and not self._description.has_dynamic_methods
        ):
            raise WorkerMethodError(
                f"the workers of group {self._name!r} have no method {method_name!r}"
                f"{did_you_mean(method_name, self._description.methods)}"
            )

    def check_call(
        self, method_name: str, ranks: Sequence[int], call_deadline_s: float | None
    ) -> None:
        """Raise unless these workers can take the call now."""
        self.check_up(method_name)
        if call_deadline_s is not None and not call_deadline_s > 0:
            raise ConfigError(
                f"call_deadline_s must be positive: got {call_deadline_s}"
            )
        # Checked only during an incident, so that the usual call pays nothing for it.
        if self._supervisor.incident is not None:
            what = f"method {method_name!r} of group {self._name!r}"
            self._supervisor.check(ranks, what)

    def called(
        self,
        method_name: str,
        run_rank_0_only_axes: Axes,
        call_deadline_s: float | None,
    ) -> Sequence[int]:
        """Return the workers of a call that leaves out axes."""
        called = plan_rank_zero_call(
            self._sharding, len(self._workers), run_rank_0_only_axes
        )
        self.check_call(method_name, called, call_deadline_s)
        return called

    def send(
        self,
        method_name: str,
        called: Sequence[int],
        arguments: Sequence[Mapping[str, Any]],
        call_deadline_s: float | None,
    ) -> CallReferences:
        """Call each of these workers with its own arguments."""
        context = portable_log_context()
        references = CallReferences(
            [
                self.submit(worker, method_name, kwargs, context)
                for worker, kwargs in zip(called, arguments, strict=True)
            ],
            method_name,
            called,
        )
        self.limit(method_name, called, references, call_deadline_s)
        # Only calls that may be retried keep their arguments in memory. Generators are
        # never retried, because their items may have been consumed already.
        retries = self._supervisor.policy.retries(method_name)
        if retries and method_name not in self._description.generator_methods:
            references.repeat = self._repeater(
                method_name, called, arguments, call_deadline_s
            )
        return references

    def submit(
        self,
        worker: int,
        method_name: str,
        kwargs: Mapping[str, Any],
        context: Mapping[str, Any] | None,
    ) -> Any:
        """Hand one call to Ray."""
        handle = self._workers[worker].handle
        if method_name in self._description.generator_methods:
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
        # Captured now, so that the retry logs with the context of the
        # call and not of the wait.
        context = portable_log_context()

        def repeat(place: int) -> Any:
            worker = called[place]
            reference = self.submit(worker, method_name, arguments[place], context)
            # The retry gets a full deadline: the first attempt may have
            # used up the time.
            self.limit(method_name, (worker,), [reference], call_deadline_s)
            return reference

        return repeat

    def limit(
        self,
        method_name: str,
        called: Sequence[int],
        references: Sequence[Any],
        call_deadline_s: float | None,
    ) -> None:
        """Have the supervisor terminate workers that miss the deadline."""
        if call_deadline_s is None:
            return
        if not call_deadline_s > 0:
            raise ConfigError(
                f"call_deadline_s must be positive: got {call_deadline_s}"
            )
        add_call_deadline(
            self._supervisor.watch,
            f"method {method_name!r} of group {self._name!r}",
            {
                end_of(reference): (worker, self._workers[worker].incarnation)
                for worker, reference in zip(called, references, strict=True)
            },
            call_deadline_s,
        )

    def common(
        self,
        common: Mapping[str, Any] | None,
        others: Mapping[str, Any],
        num_calls: int,
    ) -> dict[str, Any]:
        """Return the arguments that all calls share; large ones are stored once."""
        common = common or {}
        if others:
            check_given_once("common_kwargs", common, others)
        # Storing an argument pays off only when several calls share it.
        if num_calls == 1:
            return dict(common)
        return {name: shared_argument(value) for name, value in common.items()}

    @staticmethod
    def slices(
        plan: CallPlan, common: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the arguments of each called worker; equal slices are stored once."""
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

    def plan(
        self, split: Axes, copied: Axes, same_output: Axes, dummies: bool
    ) -> CallPlan:
        """Return which worker gets which slice; plans are cached."""
        if self._sharding is None:
            raise ShardingError(
                f"group {self._name!r} was made without sharding_annotations, which "
                "run_all_workers_sharded_data needs; pass a NamedSharding when making "
                "the group"
            )
        # Lists are not hashable. A string is kept as it is, so that the
        # plan can reject it.
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
                self._sharding, split, copied, same_output, dummies
            )
        return plan
