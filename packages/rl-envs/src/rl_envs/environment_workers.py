"""`EnvironmentWorkers`: the worker group of an environment, and its calls.

The group (`rl_distributed.workers`) watches its processes, explains their failures and
restarts them. This module decides which calls are repeated: an environment keeps no
state between calls, so the rows of a dead worker are sent to its replacement,
`max_restarts` times in a row. A worker that misses the deadline is terminated,
reported, and replaced before the next call. While no node has room for a worker, as
after the loss of one, others get its rows.

Calls may come from several threads; each uses idle workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
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
    WorkerError,
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
# Failures of the process rather than the call: the rows are sent to its replacement.
_DEATHS = (WorkerDiedError, WorkerHungError)


class EnvironmentWorkers:
    """Workers that each hold the same environment.

    Args:
        spec: How to create the environment.
        num_workers: Number of processes.
        num_cpus: CPUs that Ray reserves for each.
        deadline_s: Time limit of a call, in seconds.
        start_deadline_s: Time limit for the workers to start, in seconds.
        env_vars: Environment variables of the workers.
        max_restarts: Number of consecutive times that dead workers are replaced.

    Raises:
        WorkerStartError: A worker does not start.
        ActorEnvironmentError: The declared environment cannot be built.
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
        # Attempts with deaths since the last call that succeeded. Simultaneous deaths
        # count once, so that a machine out of memory does not use up all restarts.
        self._num_deaths = 0
        # Workers whose end was reported, and which the next call restarts.
        self._ended: set[int] = set()
        # Those among them that no node has room for.
        self._away: set[int] = set()
        # Held while workers restart: two threads must not restart the same one.
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

    @property
    def deadline_s(self) -> float:
        """Time limit of a call, in seconds."""
        return self._deadline_s

    def health(self) -> list[WorkerHealth]:
        """Return the state of each worker, or the reason why it is gone."""
        return self._group.health()

    def shutdown(self) -> None:
        """Shut the environments down and stop their processes; safe to call again."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:
            # In reverse order: environments close, processes stop, bundles are freed.
            closing.callback(self._cluster.shutdown)
            closing.callback(self._group.shutdown, force=True)
            # The driver may have shut Ray down already, and the workers with it.
            if ray.is_initialized():
                up = [h.rank for h in self._group.health() if h.failure is None]
                # Best effort: an environment that raises or hangs here is killed next.
                self._attempt({index: {} for index in up}, "shutdown", _SHUTDOWN_S)

    def _label(self, index: int) -> str:
        return f"environment {self._name!r}, worker {index} of {self._num_workers}"

    @contextmanager
    def taken(self, most: int) -> Iterator[list[int]]:
        """Reserve idle workers for the caller, waiting until there is at least one.

        Args:
            most: Number of workers that the caller can use.

        Yields:
            Their indices in order: all idle workers, up to `most`.

        Raises:
            DeadlineExceededError: Other threads kept all workers busy.
        """
        end_s = time.monotonic() + self._deadline_s
        with self._idle_changed:
            left_s = end_s - time.monotonic()
            if not self._idle_changed.wait_for(lambda: bool(self._idle), left_s):
                raise DeadlineExceededError(
                    f"environment {self._name!r}: all {self._num_workers} workers were "
                    f"busy for {self._deadline_s:g} s; raise env.num_workers, or limit "
                    "how long the environment waits"
                )
            # All idle workers now, rather than a wait for more: a caller that waited
            # for a full set could starve while others keep taking single ones.
            # Workers without a node only where there is nothing else.
            taken = sorted(self._idle - self._away or self._idle)[: max(1, most)]
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
        """Call a method of some workers, repeating the calls of those that die.

        Args:
            arguments: Arguments of the method, by the index of the worker.
            method: Name of a method of `EnvironmentHost`.
            deadline_s: Time limit in seconds; None: the constructor's.

        Returns:
            The replies in the order of `arguments`.

        Raises:
            As `RemoteEnvironment.step`.
        """
        if self._closed:
            raise WorkerDiedError(
                f"environment {self._name!r} was shut down; create a new one"
            )
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        values: dict[int, Any] = {}
        while len(values) < len(arguments):
            self._replace_ended()
            left = {i: kwargs for i, kwargs in arguments.items() if i not in values}
            ranks = self._ranks_for(left)
            answers, errors = self._attempt(
                {rank: left[i] for i, rank in ranks.items()}, method, deadline_s
            )
            values |= {i: answers[r] for i, r in ranks.items() if r in answers}
            deaths = {i: e for i, e in errors.items() if isinstance(e, _DEATHS)}
            late = [
                i for i, e in errors.items() if isinstance(e, DeadlineExceededError)
            ]
            # The caller may learn of a death before the group's watch does; a worker
            # that the group believes alive would not be restarted.
            self._group.end(list(deaths), f"its process failed during {method}")
            self._group.end(late, f"it did not reply to {method} in time")
            with self._replacing:
                self._ended |= {*deaths, *late}
            # Not repeated, unlike a death: rows that are slow once are slow again, and
            # the caller has already waited for the whole deadline.
            if late:
                raise DeadlineExceededError(
                    f"{', '.join(map(self._label, late))}: no answer to {method} "
                    f"within {deadline_s:g} s; the process was terminated. Limit how "
                    "long the environment waits, or raise the deadline"
                )
            for index, error in errors.items():
                if index not in deaths:
                    raise self._named(error, index, method) from error.__cause__
            if deaths:
                self._report_deaths(deaths, method)
        self._num_deaths = 0
        return [values[index] for index in arguments]

    def end(self, index: int, cause: str) -> None:
        """End the process of a worker; the next call of it starts another."""
        self._group.end([index], cause)
        with self._replacing:
            self._ended.add(index)

    def _replace_ended(self) -> None:
        """Restart the workers whose end was reported, where a node has room."""
        with self._replacing:
            if not self._ended:
                return
            while True:
                away = lacking = self._ended & set(self._group.ranks_without_node())
                if len(away) == self._num_workers:
                    # Nobody else could take the rows: wait for a node.
                    away = set()
                try:
                    self._group.restart(sorted(self._ended - away))
                    break
                except (WorkerStartError, DeadlineExceededError):
                    # Otherwise another node was lost while they started.
                    if lacking == self._ended & set(self._group.ranks_without_node()):
                        raise
            self._ended = away
            if away and away != self._away:
                _logger.warning(
                    "environment %r: no node has room for worker(s) %s now; the others "
                    "get their rows",
                    *(self._name, sorted(away)),
                )
            self._away = away

    def _ranks_for(self, wanted: Iterable[int]) -> dict[int, int]:
        """Return which worker serves which of these: itself, or one that has a node.

        Some may be left out, for a later attempt: a worker gets one call at a time.
        """
        wanted, away = list(wanted), self._away
        ranks = {index: index for index in wanted if index not in away}
        others = [r for r in range(self._num_workers) if r not in away | set(ranks)]
        # Those that serve their own rows are busy in this attempt.
        ranks |= zip((i for i in wanted if i in away), others, strict=False)
        return ranks

    def _attempt(
        self,
        arguments: Mapping[int, Mapping[str, Any]],
        method: str,
        deadline_s: float,
    ) -> tuple[dict[int, Any], dict[int, DistributedError]]:
        """Make each call once; return the replies and the errors by worker."""
        values: dict[int, Any] = {}
        errors: dict[int, DistributedError] = {}
        sent: dict[int, Any] = {}
        for index, kwargs in arguments.items():
            try:
                sent[index] = self._group.run_single_worker_single_data(
                    method, index, common_kwargs=kwargs
                )
            except _DEATHS as error:
                # It died between two calls. The other workers still get their rows.
                errors[index] = error
        future = MultiWorkerFuture(
            list(sent.values()), None, list(sent), method, self._group
        )
        for outcome in future.outcomes(deadline_s):
            if outcome.error is None:
                values[outcome.rank] = outcome.value
            else:
                errors[outcome.rank] = outcome.error
        # Sorted, so that messages name workers in the same order whoever replied first.
        return values, dict(sorted(errors.items()))

    def _named(
        self, error: DistributedError, index: int, method: str
    ) -> DistributedError:
        """Add the environment's name to a method's error; return others unchanged."""
        failure = error.failure if isinstance(error, WorkerMethodError) else None
        if failure is None:
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
        """Log that dead workers are replaced, or raise if it happened too often."""
        self._num_deaths += 1
        labels = ", ".join(map(self._label, deaths))
        first = next(iter(deaths.values()))
        failure = first.failure if isinstance(first, WorkerError) else None
        cause = (str(first) if failure is None else failure.cause).rstrip(".")
        said = f"{labels}: the process ended during {method}: {cause}"
        if self._num_deaths > self._max_restarts:
            error = WorkerDiedError(
                f"{said}. It was replaced {self._num_deaths - 1} times in a row "
                "(max_restarts); find out why it dies (out of memory, or a crash in "
                "native code)"
            )
            error.failure = failure
            raise error from first
        _logger.warning(
            "%s. Replacing it and resending its rows (%d of %d)",
            said,
            self._num_deaths,
            self._max_restarts,
        )


def worker_cluster(
    name: str, *, num_workers: int, num_cpus: float, start_deadline_s: float
) -> RayVirtualCluster:
    """Reserve a bundle for each worker of an environment.

    Args:
        name: Name of the environment.
        num_workers: Number of workers.
        num_cpus: CPUs that Ray reserves for each.
        start_deadline_s: Time limit of the reservation, in seconds.
    """
    return RayVirtualCluster(
        [num_workers],
        use_gpus=False,
        max_colocated_worker_groups=1,
        name=f"environment {name!r}",
        deadline_s=start_deadline_s,
        # Workers do not talk to each other, so they may be spread over nodes.
        unified=True,
        # Ray rejects empty bundles; a byte of memory is free on every node.
        bundle_resources={"CPU": num_cpus, "memory": 1.0},
    )


def worker_builder(spec: EnvironmentSpec) -> RayWorkerBuilder:
    """Return a builder of workers, in the Python environment that is declared.

    Raises:
        ConfigError: The environment cannot be sent to another process.
    """
    # A worker is a new process: it knows installed packages, not the driver's own
    # names.
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
        WorkerStartError: A worker does not start.
        ActorEnvironmentError: The declared environment cannot be built.
    """
    declared = declared_environment(spec.declares)
    try:
        return RayWorkerGroup(
            cluster,
            worker_builder(spec),
            name_prefix=f"environment-{spec.name}",
            env_vars=env_vars,
            start_deadline_s=start_deadline_s,
            # Workers are independent: one failure must not stop the others' calls.
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
        # cloudpickle, since reward functions may be lambdas or defined in the script.
        pickled: bytes = cloudpickle.dumps(spec)
    except Exception as error:
        raise ConfigError(
            f"environment {spec.name!r} cannot be sent to another process: {error}; "
            "create locks, files and connections on first use, or pass the class "
            "instead of an object"
        ) from error
    return pickled
