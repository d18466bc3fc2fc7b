"""`EnvironmentWorkers`: the worker group of an environment, and its calls.

The group (`rl_distributed.workers`) watches its processes, explains their failures and
starts them again. Decided here is which calls are made again: an environment keeps
nothing between calls, so the rows of a worker that died are sent to the one that
replaces it, `max_restarts` times in a row. One that misses the deadline is ended,
reported, and replaced for the next call.

Calls may come from several threads: each takes workers that are idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray import cloudpickle

from rl_distributed.actor_environments import declared_environment
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    ActorEnvironmentError,
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    WorkerDiedError,
    WorkerHungError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_distributed.failures.worker import WorkerHealth
from rl_distributed.logs.logging import get_logger
from rl_distributed.workers import FailFast, RayWorkerBuilder, RayWorkerGroup
from rl_distributed.workers.future import MultiWorkerFuture
from rl_envs.environment_host import DriverNames
from rl_envs.registry import EnvironmentSpec, env_registry, task_registry

__all__ = ["EnvironmentWorkers", "worker_builder", "worker_cluster"]

_logger = get_logger(__name__)
_HOST = "rl_envs.environment_host.EnvironmentHost"
_SHUTDOWN_S = 5.0
# What ends a process, and not only a call: the rows are sent to its successor.
_DEATHS = (WorkerDiedError, WorkerHungError)


class EnvironmentWorkers:
    """Workers that each hold the same environment.

    Args:
        spec: How to make the environment.
        num_workers: Processes.
        num_cpus: CPUs that Ray sets aside for each.
        deadline_s: Seconds that a call may take.
        start_deadline_s: Seconds that the workers may take to start.
        env_vars: Environment variables of the workers.
        max_restarts: How often in a row dead workers are replaced.

    Raises:
        WorkerStartError: A worker does not come up.
        ActorEnvironmentError: The declared environment cannot be made.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        num_workers: int,
        num_cpus: float,
        deadline_s: float,
        start_deadline_s: float,
        env_vars: Mapping[str, str] | None,
        max_restarts: int,
    ) -> None:
        self._name = spec.name
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._max_restarts = max_restarts
        # Deaths since the last call that succeeded; those at one time count once.
        self._num_deaths = 0
        # Workers whose end was reported, and which the next call starts again.
        self._ended: set[int] = set()
        # Held while workers are started again, which two calls must not do at once.
        self._replacing = threading.Lock()
        self._idle = set(range(num_workers))
        self._idle_changed = threading.Condition()
        self._closed = False
        self._cluster = worker_cluster(
            spec.name,
            num_workers=num_workers,
            num_cpus=num_cpus,
            start_deadline_s=start_deadline_s,
        )
        try:
            self._group = _start(spec, self._cluster, env_vars, start_deadline_s)
        except BaseException:
            self._cluster.shutdown()
            raise

    def __len__(self) -> int:
        return self._num_workers

    def health(self) -> list[WorkerHealth]:
        """Return how each worker is, or why it is gone."""
        return self._group.health()

    def shutdown(self) -> None:
        """Shut the environments down and end their processes; may be called again."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:
            closing.callback(self._cluster.shutdown)
            closing.callback(self._group.shutdown, force=True)
            if ray.is_initialized():
                up = [h.rank for h in self._group.health() if h.failure is None]
                # An environment that raises or hangs now is ended like the others.
                self._attempt({index: {} for index in up}, "shutdown", _SHUTDOWN_S)

    def _label(self, index: int) -> str:
        return f"environment {self._name!r}, worker {index} of {self._num_workers}"

    @contextmanager
    def taken(self, most: int) -> Iterator[list[int]]:
        """Have idle workers for oneself; wait for the first of them.

        Args:
            most: How many are of use.

        Yields:
            Their indices, in order; all that are idle, up to `most`.

        Raises:
            DeadlineExceededError: Calls of other threads have kept all of them.
        """
        end_s = time.monotonic() + self._deadline_s
        with self._idle_changed:
            left_s = end_s - time.monotonic()
            if not self._idle_changed.wait_for(lambda: bool(self._idle), left_s):
                raise DeadlineExceededError(
                    f"environment {self._name!r}: all {self._num_workers} workers were "
                    f"busy for {self._deadline_s:g} s; raise env.num_workers, or bound "
                    "what the environment waits for"
                )
            taken = sorted(self._idle)[: max(1, most)]
            self._idle -= set(taken)
        try:
            yield taken
        finally:
            with self._idle_changed:
                self._idle |= set(taken)
                self._idle_changed.notify_all()

    def call(
        self,
        arguments: Mapping[int, Mapping[str, Any]],
        method: str,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Call a method of some workers; calls of those that die are made again.

        Args:
            arguments: Of the method, by the index of the worker.
            method: Which method of `EnvironmentHost`.
            deadline_s: How long it may take; None: as the constructor was told.

        Returns:
            The answers in the order of `arguments`.

        Raises:
            As `RemoteEnvironment.step`.
        """
        if self._closed:
            raise WorkerDiedError(
                f"environment {self._name!r} was shut down; make a new one"
            )
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        values: dict[int, Any] = {}
        while len(values) < len(arguments):
            self._replace_ended()
            left = {i: kwargs for i, kwargs in arguments.items() if i not in values}
            answers, errors = self._attempt(left, method, deadline_s)
            values |= answers
            deaths = {i: e for i, e in errors.items() if isinstance(e, _DEATHS)}
            late = [
                i for i, e in errors.items() if isinstance(e, DeadlineExceededError)
            ]
            # Noted with the group even where it has not found out itself.
            self._group.end(list(deaths), f"its process failed during {method}")
            self._group.end(late, f"it had no answer to {method} in time")
            with self._replacing:
                self._ended |= {*deaths, *late}
            if late:
                raise DeadlineExceededError(
                    f"{', '.join(map(self._label, late))}: no answer to {method} "
                    f"within {deadline_s:g} s; the process was ended. Bound what "
                    "the environment waits for, or raise the deadline"
                )
            for index, error in errors.items():
                if index not in deaths:
                    raise self._named(error, index, method) from error.__cause__
            if deaths:
                self._report_deaths(deaths, method)
        self._num_deaths = 0
        return [values[index] for index in arguments]

    def _replace_ended(self) -> None:
        """Start the workers again whose end was reported."""
        with self._replacing:
            if self._ended:
                self._group.restart(sorted(self._ended))
                self._ended.clear()

    def _attempt(
        self,
        arguments: Mapping[int, Mapping[str, Any]],
        method: str,
        deadline_s: float,
    ) -> tuple[dict[int, Any], dict[int, DistributedError]]:
        """Make the calls once; return the answers, and the errors of other workers."""
        values: dict[int, Any] = {}
        errors: dict[int, DistributedError] = {}
        sent: dict[int, Any] = {}
        for index, kwargs in arguments.items():
            try:
                sent[index] = self._group.run_single_worker_single_data(
                    method, index, common_kwargs=kwargs
                )
            except _DEATHS as error:
                # It died between two calls.
                errors[index] = error
        future = MultiWorkerFuture(
            list(sent.values()), None, list(sent), method, self._group
        )
        for outcome in future.outcomes(deadline_s):
            if outcome.error is None:
                values[outcome.rank] = outcome.value
            else:
                errors[outcome.rank] = outcome.error
        return values, dict(sorted(errors.items()))

    def _named(
        self, error: DistributedError, index: int, method: str
    ) -> DistributedError:
        """Return the error of a method with the environment's name; others as is."""
        failure = getattr(error, "failure", None)
        if not isinstance(error, WorkerMethodError) or failure is None:
            return error
        named = WorkerMethodError(
            f"{self._label(index)}: {method} raised {failure.cause}\n"
            f"{failure.traceback}\nLog of the worker: {failure.log_path}"
        )
        named.failure = failure
        return named

    def _report_deaths(
        self, deaths: Mapping[int, DistributedError], method: str
    ) -> None:
        """Log that dead workers are replaced, or raise once that happened too often."""
        self._num_deaths += 1
        labels = ", ".join(map(self._label, deaths))
        first = next(iter(deaths.values()))
        failure = getattr(first, "failure", None)
        cause = (str(first) if failure is None else failure.cause).rstrip(".")
        said = f"{labels}: the process ended during {method}: {cause}"
        if self._num_deaths > self._max_restarts:
            error = WorkerDiedError(
                f"{said}. It was replaced {self._num_deaths - 1} times in a row "
                "(max_restarts); look for what ends it (memory, a crash in native code)"
            )
            error.failure = failure
            raise error from first
        _logger.warning(
            "%s. It is replaced, and its rows are sent again (%d of %d)",
            said,
            self._num_deaths,
            self._max_restarts,
        )


def worker_cluster(
    name: str, *, num_workers: int, num_cpus: float, start_deadline_s: float
) -> RayVirtualCluster:
    """Return a place for each worker of an environment.

    Args:
        name: The environment's.
        num_workers: How many.
        num_cpus: CPUs that Ray sets aside for each.
        start_deadline_s: Seconds that it may take.
    """
    return RayVirtualCluster(
        [num_workers],
        use_gpus=False,
        max_colocated_worker_groups=1,
        name=f"environment {name!r}",
        deadline_s=start_deadline_s,
        # The workers need not be on one node.
        unified=True,
        # Ray takes no empty bundle, and every node has a byte of memory left.
        bundle_resources={"CPU": num_cpus, "memory": 1.0},
    )


def worker_builder(spec: EnvironmentSpec) -> RayWorkerBuilder:
    """Return how to make a worker, in the Python environment that is declared.

    Raises:
        ConfigError: The environment cannot be sent to another process.
    """
    names = DriverNames(env_registry.registrations(), task_registry.registrations())
    builder = RayWorkerBuilder(_HOST, _pickle(spec), names)
    declared = declared_environment(spec.declares)
    if declared.source == "default":
        return builder
    return builder.with_options(environment=declared.environment)


def _start(
    spec: EnvironmentSpec,
    cluster: RayVirtualCluster,
    env_vars: Mapping[str, str] | None,
    start_deadline_s: float,
) -> RayWorkerGroup:
    """Start a worker on each bundle, in the Python environment that is declared.

    Raises:
        WorkerStartError: A worker does not come up.
        ActorEnvironmentError: The declared environment cannot be made.
    """
    declared = declared_environment(spec.declares)
    try:
        return RayWorkerGroup(
            cluster,
            worker_builder(spec),
            name_prefix=f"environment-{spec.name}",
            env_vars=env_vars,
            start_deadline_s=start_deadline_s,
            # Workers do not talk to each other; which rows go where is decided above.
            failure_policy=FailFast(release="tied"),
        )
    except ActorEnvironmentError as error:
        raise ActorEnvironmentError(
            f"environment {spec.name!r} cannot run with what it declares "
            f"({declared.source}: {declared.environment.label}): {error}"
        ) from error
    except DeadlineExceededError as error:
        raise WorkerStartError(
            f"environment {spec.name!r} did not start within {start_deadline_s:g} s: "
            f"{error}"
        ) from error


def _pickle(spec: EnvironmentSpec) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(spec)
    except Exception as error:
        raise ConfigError(
            f"environment {spec.name!r} cannot be sent to another process: {error}; "
            "make locks, files and connections when they are first used, or pass the "
            "class in place of the object"
        ) from error
    return pickled
