"""`WorkerPool`: independent tasks on the workers of a group, whatever happens to some.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| `map` | items, idle workers | a result each | running calls | the end of one |
| worker | an item | its value | the method | its end, or being killed |
| restart (a thread each) | a lost worker | an idle worker | its process | its start |
"""

from __future__ import annotations

import heapq
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray

from rl_distributed.cluster.watch import raise_if_lost
from rl_distributed.errors import (
    ConfigError,
    DistributedError,
    WorkerDiedError,
    WorkerHungError,
)
from rl_distributed.process.closing import close_after
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_distributed.workers.policy import FailFast, doubled

if TYPE_CHECKING:
    from rl_distributed.actor_environments import ActorEnvironment
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster

__all__ = ["Retry", "TaskResult", "WorkerPool"]

logger = logging.getLogger(__name__)

W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")

_LOSSES = (WorkerDiedError, WorkerHungError)
# How soon a worker that is idle again, or an item whose pause is over, is seen.
_LOOK_S = 0.2
# A value is there when its call has ended; it may have to come from another node.
_VALUE_S = 600.0


@dataclass(frozen=True)
class Retry:
    """How often an item of `WorkerPool.map` is tried.

    An item whose worker is lost is always retried. The loss counts as an attempt, as
    the item itself may be what kills its workers.
    """

    attempts: int = 3
    """Attempts in all, the first one included."""
    backoff_s: float = 0.0
    """Pause before the second attempt; doubled for each further one."""
    on: type[BaseException] | tuple[type[BaseException], ...] = ()
    """Exceptions of the method after which the item is tried again."""

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or self.attempts < 1:
            raise ConfigError(f"attempts must be at least 1: got {self.attempts!r}")
        if self.backoff_s < 0:
            raise ConfigError(f"backoff_s must not be negative: got {self.backoff_s}")

    def allows(self, error: DistributedError, attempts: int) -> bool:
        """Return whether an item is tried again that has failed so often."""
        # The worker's own exception is the cause of the error that comes here.
        is_named = isinstance(error, self.on) or isinstance(error.__cause__, self.on)
        return attempts < self.attempts and (is_named or isinstance(error, _LOSSES))


@dataclass(frozen=True)
class TaskResult(Generic[T, R]):
    """The outcome of one item of `WorkerPool.map`."""

    index: int
    """The item's place among the items."""
    item: T
    """The item itself, as it was given to `map`."""
    value: R | None
    """The method's return value; None if it failed."""
    errors: tuple[DistributedError, ...] = ()
    """Why attempts failed, in their order."""
    error: DistributedError | None = None
    """Why there is no value: the last of `errors`; None where there is one."""

    @property
    def attempts(self) -> int:
        """Number of attempts."""
        return len(self.errors) + (self.error is None)

    def get(self) -> R:
        """Return the value.

        Raises:
            DistributedError: The item failed.
        """
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class WorkerPool(Generic[W]):
    """Workers that process independent tasks.

    Every worker has at most one item at a time and gets the next when it is done. A
    worker that dies or hangs is restarted while the others continue; its item is
    retried on any of them. One whose node is lost, or still to come
    (`RayVirtualCluster.place(min_nodes=...)`), is started when a node has room for it.

    Args:
        cluster: Where the workers run.
        worker: Which class, and with which arguments; or only the class, or its path,
            where it takes no arguments.
        name: Of the pool in messages; empty: the name of the class.
        environment: The workers' isolated environment; None: what the class declares.
        options: Further keyword arguments of `RayWorkerGroup`, such as `env_vars` or
            `workers_per_node`. `failure_policy` is `FailFast(on_node_lost="shrink")`
            unless given, as the pool restarts workers itself.

    Raises:
        Error: like `RayWorkerGroup`.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        worker: RayWorkerBuilder | str | type[W],
        *,
        name: str = "",
        environment: ActorEnvironment | None = None,
        **options: Any,
    ) -> None:
        builder = RayWorkerBuilder.of(worker)
        if environment is not None:
            builder = builder.with_options(environment=environment)
        options.setdefault("failure_policy", FailFast(on_node_lost="shrink"))
        self.group = RayWorkerGroup(cluster, builder, name_prefix=name, **options)
        # Shared by all threads that map: whichever takes a rank owns that worker.
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        # For `_lost`, which restarts write in threads of their own.
        self._lock = threading.Lock()
        self._lost: dict[int, DistributedError] = {}
        self._is_closed = False
        for rank in range(self.group.world_size):
            self.give_back(rank)

    def map(
        self,
        method: Callable[[W, T], R] | str,
        items: Iterable[T],
        *,
        retries: Retry | None = None,
        ordered: bool = False,
        call_deadline_s: float | None = None,
    ) -> Iterator[TaskResult[T, R]]:
        """Call a method with each item and yield results as they are ready.

        Items are taken from `items` when there is a worker for them. If the iteration
        ends early, running calls are cancelled.

        Args:
            method: A method of the class, such as `Trial.run`, which is called with the
                item as its first argument; or its name, and the items are mappings of
                arguments by name.
            items: One for each call.
            retries: When an item is tried again; None: `Retry()`.
            ordered: Give results in the order of the items, not as they are ready.
            call_deadline_s: How long one attempt may take; a worker that exceeds it
                counts as hung, and is started again. None: no limit.

        Yields:
            One result per item. An item that fails has an error in its result.

        Raises:
            ConfigError: The method takes no argument, or an item is no mapping of
                arguments.
            WorkerError: The pool is closed, or no worker is left, as none of them could
                be started again.
            ClusterLostError: Ray itself is gone.
        """
        retries = retries or Retry()
        name, as_arguments = _named_arguments(method)
        run = _Run(self, name, as_arguments, retries, call_deadline_s)
        results: Iterator[TaskResult[T, R]] = run.results(items)
        return _in_order(results) if ordered else results

    @property
    def num_idle(self) -> int:
        """Number of workers that are up and have nothing to do."""
        return self._idle.qsize()

    def take_idle(self) -> int | None:
        """Return a worker that has nothing to do; None: there is none now.

        Raises:
            WorkerError: there will be none again.
        """
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            lost = dict(self._lost)
        # While any worker is being restarted, there is something to wait for.
        if len(lost) == self.group.world_size or self._is_closed:
            error = WorkerDiedError(
                f"pool {self.group.name!r} has no worker left: "
                f"{next(iter(lost.values()), 'it is closed')}; make another pool"
            )
            raise error from next(iter(lost.values()), None)
        return None

    def give_back(self, rank: int) -> None:
        """Return a worker to the pool, which starts it again where it is gone."""
        if self.group.supervisor.failure_of(rank) is None:
            self._idle.put(rank)
            return
        # A restart takes seconds, in which the other workers go on.
        threading.Thread(
            target=self._restart, args=(rank,), name="restart", daemon=True
        ).start()

    def _restart(self, rank: int) -> None:
        try:
            self.group.restart([rank])
        except DistributedError as error:
            if not self._is_closed:
                logger.warning(
                    "worker %d of pool %r stays away: %s", rank, self.group.name, error
                )
            with self._lock:
                self._lost[rank] = error
        else:
            self._idle.put(rank)

    def close(self) -> None:
        """End the workers; may be called more than once."""
        self._is_closed = True
        self.group.shutdown()

    def __enter__(self) -> WorkerPool[W]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(error, self.close, f"worker pool {self.group.name!r}")


@dataclass
class _Task:
    """An item under way."""

    index: int
    item: Any
    errors: tuple[DistributedError, ...] = ()


class _Run:
    """One `map` of a pool."""

    def __init__(
        self,
        pool: WorkerPool[Any],
        method_name: str,
        as_arguments: Callable[[Any], Mapping[str, Any]],
        retries: Retry,
        call_deadline_s: float | None,
    ) -> None:
        self._pool = pool
        self._method_name = method_name
        self._as_arguments = as_arguments
        self._retries = retries
        self._call_deadline_s = call_deadline_s
        self._running: dict[Any, tuple[int, _Task]] = {}
        self._again: list[tuple[float, int, _Task]] = []
        """Items to try again, by when they may be and their index."""

    def results(self, items: Iterable[Any]) -> Iterator[TaskResult[Any, Any]]:
        """Keep every idle worker at work until each item has a result."""
        fresh = (_Task(index, item) for index, item in enumerate(items))
        upcoming = next(fresh, None)
        try:
            while upcoming or self._again or self._running:
                # Items to try again go first: they are the oldest, and an ordered map
                # waits for them.
                while task := self._ripe() or upcoming:
                    rank = self._pool.take_idle()
                    if rank is None:
                        break
                    if task is upcoming:
                        upcoming = next(fresh, None)
                    else:
                        heapq.heappop(self._again)
                    self._start(rank, task)
                yield from self._ended()
        finally:
            for reference, (rank, _) in self._running.items():
                # The caller stopped iterating, or an item could not be sent.
                # Without force: the worker is wanted by other maps, and one that goes
                # on is busy until it is done.
                self._future(reference, rank).cancel(grace_s=0.0, force=False)
                self._pool.give_back(rank)

    def _ripe(self) -> _Task | None:
        if self._again and self._again[0][0] <= time.monotonic():
            return self._again[0][2]
        return None

    def _start(self, rank: int, task: _Task) -> None:
        try:
            reference = self._pool.group.run_single_worker_single_data(
                self._method_name,
                rank,
                common_kwargs=self._as_arguments(task.item),
                call_deadline_s=self._call_deadline_s,
            )
        except _LOSSES:
            # The worker was lost while it was idle; the item has nothing to do with it.
            heapq.heappush(self._again, (time.monotonic(), task.index, task))
            self._pool.give_back(rank)
        except BaseException:
            self._pool.give_back(rank)
            raise
        else:
            self._running[reference] = (rank, task)

    def _ended(self) -> Iterator[TaskResult[Any, Any]]:
        """Wait a moment for calls to end; the results that are final."""
        if not self._running:
            # Nothing of this map runs that could be waited for: other maps have the
            # workers, or a pause is not over.
            time.sleep(_LOOK_S)
            raise_if_lost()
            return
        ready, waiting = ray.wait(
            list(self._running), num_returns=1, timeout=_LOOK_S, fetch_local=False
        )
        if not ready:
            raise_if_lost()
            # Of a worker on a lost node, Ray itself says nothing for a long time.
            failure_of = self._pool.group.supervisor.failure_of
            ready = [ref for ref in waiting if failure_of(self._running[ref][0])]
        for reference in ready:
            rank, task = self._running.pop(reference)
            # By outcomes, which never raise the failure of another worker.
            (outcome,) = self._future(reference, rank).outcomes(_VALUE_S)
            self._pool.give_back(rank)
            if outcome.error is None:
                yield TaskResult(task.index, task.item, outcome.value, task.errors)
                continue
            errors = (*task.errors, outcome.error)
            if self._retries.allows(outcome.error, len(errors)):
                pause_s = doubled(self._retries.backoff_s, len(errors) - 1)
                again = _Task(task.index, task.item, errors)
                at = time.monotonic() + pause_s
                heapq.heappush(self._again, (at, task.index, again))
            else:
                yield TaskResult(task.index, task.item, None, errors, outcome.error)

    def _future(self, reference: Any, rank: int) -> MultiWorkerFuture:
        return MultiWorkerFuture(
            [reference], None, [rank], self._method_name, self._pool.group
        )


def _named_arguments(
    method: Callable[..., Any] | str,
) -> tuple[str, Callable[[Any], Mapping[str, Any]]]:
    """Return the name of a method, and how an item becomes its arguments."""
    if isinstance(method, str):

        def by_name(item: Any) -> Mapping[str, Any]:
            if not isinstance(item, Mapping):
                raise ConfigError(
                    f"items of the named method {method!r} must be mappings of its "
                    f"arguments by name: got {item!r}; give the method itself, such as "
                    f"Class.{method}, to call it with the item as first argument"
                )
            return item

        return method, by_name
    parameters = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(parameters) < 2:
        raise ConfigError(
            f"the method of a map must take self and the item, by names: got {method!r}"
        )
    return method.__name__, lambda item: {parameters[1]: item}


def _in_order(results: Iterator[TaskResult[T, R]]) -> Iterator[TaskResult[T, R]]:
    """Hold results back until all before them have come."""
    held: dict[int, TaskResult[T, R]] = {}
    index = 0
    for result in results:
        held[result.index] = result
        while index in held:
            yield held.pop(index)
            index += 1
