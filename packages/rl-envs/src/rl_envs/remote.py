"""`RemoteEnvironment`: an environment in a worker group of its own.

```
step(B rows) --chunks--> RayWorkerGroup of EnvironmentHost --> EnvironmentReturn
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | rows | the result | all workers | their answers, a death, the deadline |
| worker | a chunk | its answer | the environment | the environment, or being killed |

The group watches its processes, explains their failures and starts them again. Decided
here is which calls are made again: an environment keeps nothing between calls, so the
rows of a worker that died are sent to the one that replaces it, `max_restarts` times in
a row. One that misses the deadline is ended, reported, and replaced for the next call.
`shutdown` asks every environment to shut down, briefly, then ends the workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle

from rl_distributed.actor_environments import declared_environment
from rl_distributed.batch.arrays import concat, to_numpy
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
from rl_distributed.logs.logging import get_logger
from rl_distributed.workers import FailFast, RayWorkerBuilder, RayWorkerGroup
from rl_distributed.workers.future import MultiWorkerFuture
from rl_envs.environment_host import Abilities, DriverNames
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    as_columns,
    num_rows,
)
from rl_envs.metrics import reward_metrics
from rl_envs.registry import (
    EnvFactory,
    EnvironmentSpec,
    EnvSettings,
    env_registry,
    task_registry,
)
from rl_envs.rewards.lists import RewardFns

if TYPE_CHECKING:
    import torch

__all__ = ["RemoteEnvironment", "join_returns"]

_logger = get_logger(__name__)
_SHUTDOWN_S = 5.0
_ROWS_PER_CHECK = 256
_HOST = "rl_envs.environment_host.EnvironmentHost"
# What ends a process, and not only a call: the rows are sent to its successor.
_DEATHS = (WorkerDiedError, WorkerHungError)


def join_returns(
    parts: Sequence[EnvironmentReturn[Any]],
) -> EnvironmentReturn[Any]:
    """Put the answers to consecutive chunks of a batch together.

    Raises:
        EnvironmentContractError: The chunks have different rewards.
    """
    parts = [as_columns(part) for part in parts]
    if len(parts) == 1:
        return parts[0]
    answers: list[str | None] | None = None
    if any(part.answers is not None for part in parts):
        answers = []
        for part in parts:
            answers.extend(part.answers or [None] * len(part.terminateds))
    return EnvironmentReturn(
        observations=[row for part in parts for row in part.observations],
        metadata=[row for part in parts for row in part.metadata],
        next_stop_strings=[row for part in parts for row in part.next_stop_strings],
        rewards=_join_rewards(parts),
        terminateds=concat([part.terminateds for part in parts]),
        answers=answers,
    )


def _join_rewards(parts: Sequence[EnvironmentReturn[Any]]) -> Rewards:
    rewards = [part.rewards for part in parts]
    named = [part for part in rewards if isinstance(part, dict)]
    if not named:
        return concat([part for part in rewards if not isinstance(part, dict)])
    names = list(named[0])
    columns: list[dict[str, torch.Tensor]] = []
    for part in parts:
        values = part.rewards
        if not isinstance(values, dict) and _knows_no_name(values, part):
            values = dict.fromkeys(names, values)
        if not isinstance(values, dict) or set(values) != set(names):
            got = sorted(values) if isinstance(values, dict) else "one reward per row"
            raise EnvironmentContractError(
                f"an environment must give the same rewards for every row: got {got} "
                f"and {sorted(names)} in one batch"
            )
        columns.append(values)
    return {name: concat([column[name] for column in columns]) for name in names}


def _knows_no_name(rewards: torch.Tensor, part: EnvironmentReturn[Any]) -> bool:
    """Whether no row of a chunk was scored: all failed, or go on without a reward."""
    values, ended = to_numpy(rewards), to_numpy(part.terminateds)
    return bool((np.isnan(values) | (~ended & (values == 0))).all())


class RemoteEnvironment(EnvironmentInterface[Any]):
    """Runs an environment in a group of workers, behind the same interface.

    Ray is started on this machine if it is not up. Only `role` and `content` of the
    messages travel. Where the class of the environment declares an `actor_environment`
    (or one is declared for it), its workers run there, with the packages that it needs.

    Args:
        env: A registered name, an environment class, an environment (each worker gets
            a copy), or a reward function (or several), which may be a lambda.
        config: Settings of a name or class; arguments of the wrapper of a function.
        num_workers: Processes that share the rows of a batch.
        num_cpus: CPUs that Ray sets aside for each; 0 fits into a full cluster.
        deadline_s: Seconds that a call may take.
        start_deadline_s: Seconds that the workers may take to start.
        env_vars: Environment variables of the workers. Those with the name of a secret
            reach them before the environment is made, and no log of Ray.
        max_restarts: How often in a row dead workers are replaced and their rows sent
            again; a call that succeeds begins a new count. 0: a death is an error.

    Raises:
        UserError: The name, settings or function are wrong, or the class declares an
            environment that cannot be made.
        WorkerStartError: A worker does not come up.
    """

    def __init__(
        self,
        env: str | EnvFactory | EnvironmentInterface[Any] | RewardFns,
        config: EnvSettings = None,
        *,
        num_workers: int = 1,
        num_cpus: float = 0.0,
        deadline_s: float = 600.0,
        start_deadline_s: float = 120.0,
        env_vars: Mapping[str, str] | None = None,
        max_restarts: int = 3,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1: got {num_workers}")
        for name, value in (
            ("deadline_s", deadline_s),
            ("start_deadline_s", start_deadline_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name} must be positive: got {value}")
        if max_restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0: got {max_restarts}")
        spec = EnvironmentSpec.of(env, config)
        self.name = spec.name
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._max_restarts = max_restarts
        # Deaths since the last call that succeeded; those at one time count once.
        self._num_deaths = 0
        # Workers whose end was reported, and which the next call starts again.
        self._ended: set[int] = set()
        self._closed = False
        with ExitStack() as closing:
            cluster = RayVirtualCluster(
                [num_workers],
                use_gpus=False,
                max_colocated_worker_groups=1,
                name=f"environment {spec.name!r}",
                deadline_s=start_deadline_s,
                # The workers need not be on one node.
                unified=True,
                # Ray takes no empty bundle, and every node has a byte of memory left.
                bundle_resources={"CPU": num_cpus, "memory": 1.0},
            )
            closing.callback(cluster.shutdown)
            self._group = _start(spec, cluster, env_vars, start_deadline_s)
            self._cluster = cluster
            closing.callback(self.shutdown)
            [abilities] = self._call({0: {}}, "abilities", start_deadline_s)
            self._abilities: Abilities = abilities
            closing.pop_all()

    # Calls ----------------------------------------------------------------------

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Judge a batch, split among the workers.

        Raises:
            UserError: As the environment raised it.
            WorkerMethodError: The environment raised anything else; the message holds
                the worker's own traceback.
            WorkerDiedError: The process of a worker ended, as did those that replaced
                it.
            WorkerStartError: A dead worker could not be replaced.
            DeadlineExceededError: A worker did not answer in time.
        """
        num_rows(message_log_batch, metadata)
        logs = [_as_text(log) for log in message_log_batch]
        joined = join_returns(self._call_in_chunks("step", logs, list(metadata)))
        return as_columns(joined) if self._abilities.is_function else joined

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """Judge the conversations of each prompt, prompts split among the workers.

        Raises:
            As `step`.
        """
        if not self._abilities.scores_groups:
            return None
        groups = [[_as_text(log) for log in group] for group in message_logs]
        parts = self._call_in_chunks("score_groups", groups, [*map(list, metadata)])
        if any(part is None for part in parts):
            # A wrapper has the method, and the environment inside does not.
            return None
        return [rewards for part in parts for rewards in part]

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Look at rows of a data set, split among the workers.

        Raises:
            As `step`.
        """
        found: dict[int, str] = {}
        if not self._abilities.checks_rows:
            return found
        size = self._num_workers
        # A call has a deadline: each worker gets few rows at a time.
        for first in range(0, len(metadata), size * _ROWS_PER_CHECK):
            rows = metadata[first : first + size * _ROWS_PER_CHECK]
            parts = [rows[index::size] for index in range(min(size, len(rows)))]
            answers = self._call(
                {index: {"metadata": part} for index, part in enumerate(parts)},
                "unusable_rows",
            )
            for index, answer in enumerate(answers):
                for place, reason in answer.items():
                    found[first + index + place * size] = reason
        return dict(sorted(found.items()))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return what the environment said when its workers started."""
        return list(self._abilities.tools)

    def _call_in_chunks(
        self, method: str, rows: list[Any], metadata: list[Any]
    ) -> list[Any]:
        """Call a method with consecutive parts of the rows, one per worker."""
        num_chunks = max(1, min(self._num_workers, len(rows)))
        bounds = [len(rows) * index // num_chunks for index in range(num_chunks + 1)]
        chunks = {
            index: {"message_logs": rows[begin:end], "metadata": metadata[begin:end]}
            for index, (begin, end) in enumerate(itertools.pairwise(bounds))
        }
        return self._call(chunks, method)

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Let the first worker look at the whole batch, if its environment does.

        Raises:
            As `step`.
        """
        if self._abilities.is_function:
            return batch, reward_metrics(batch)
        if not self._abilities.post_processes:
            return super().global_post_process_and_metrics(batch)
        [result] = self._call({0: {"batch": batch}}, "global_post_process_and_metrics")
        processed, metrics = result
        return processed, metrics

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

    def __enter__(self) -> RemoteEnvironment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # Workers --------------------------------------------------------------------

    def _label(self, index: int) -> str:
        return f"environment {self.name!r}, worker {index} of {self._num_workers}"

    def _call(
        self,
        arguments: Mapping[int, Mapping[str, Any]],
        method: str,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Call a method of some workers; calls of those that die are made again."""
        if self._closed:
            raise WorkerDiedError(
                f"environment {self.name!r} was shut down; make a new one"
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
            self._group.end(deaths, f"its process failed during {method}")
            self._group.end(late, f"it had no answer to {method} in time")
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
    names = DriverNames(env_registry.registrations(), task_registry.registrations())
    builder = RayWorkerBuilder(_HOST, _pickle(spec), names)
    declared = declared_environment(spec.declares)
    if declared.source != "default":
        builder = builder.with_options(environment=declared.environment)
    try:
        return RayWorkerGroup(
            cluster,
            builder,
            name_prefix=f"environment {spec.name}",
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


def _as_text(log: MessageLog) -> list[dict[str, Any]]:
    return [{"role": m.get("role"), "content": m.get("content")} for m in log]


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
