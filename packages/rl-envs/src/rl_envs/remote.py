"""`RemoteEnvironment`: an environment in processes of its own.

```
step(B rows) --chunks--> [EnvironmentHost] x num_workers --> EnvironmentReturn
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | rows | the result | all workers | their answers, a death, the deadline |
| worker | a chunk | its answer | the environment | the environment, or being killed |

An environment keeps nothing between calls, so a worker that dies is replaced and its
rows are sent again, `max_restarts` times in a row. One that misses the deadline is
killed, reported, and replaced for the next call. `shutdown` asks every environment to
shut down, briefly, then kills the workers.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle

from rl_distributed.batch.arrays import concat, to_numpy
from rl_distributed.cluster.start import init_ray
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerStartError,
)
from rl_distributed.logs.logging import get_logger
from rl_distributed.secret_variables import secrets_of
from rl_distributed.workers.failures import cause_of_death
from rl_envs.environment_host import (
    Abilities,
    DriverNames,
    EnvironmentHost,
    Outcome,
)
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
# The process of an actor is gone; Ray's monitor ends one for want of memory.
_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)


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
    """Runs an environment in one or more Ray actors, behind the same interface.

    Ray is started on this machine if it is not up. Only `role` and `content` of the
    messages travel.

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
        UserError: The name, settings or function are wrong.
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
        self._spec_pickle = _pickle(spec)
        # An environment may make another one by name.
        self._names = DriverNames(
            env_registry.registrations(),
            task_registry.registrations(),
            [str(Path(folder or ".").resolve()) for folder in sys.path],
        )
        self._num_cpus = num_cpus
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._env_vars = dict(env_vars or {})
        self._max_restarts = max_restarts
        # Deaths since the last call that succeeded; those at one time count once.
        self._num_deaths = 0
        self._abilities = Abilities(False, False, False, [])
        self._workers: list[Any] = [None] * num_workers
        self._closed = False
        try:
            self._start_missing()
        except BaseException:
            self.shutdown()
            raise

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
        size = len(self._workers)
        # A call has a deadline: each worker gets few rows at a time.
        for first in range(0, len(metadata), size * _ROWS_PER_CHECK):
            rows = metadata[first : first + size * _ROWS_PER_CHECK]
            parts = [rows[index::size] for index in range(min(size, len(rows)))]
            answers = self._call_workers([("unusable_rows", part) for part in parts])
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
        num_chunks = max(1, min(len(self._workers), len(rows)))
        bounds = [len(rows) * index // num_chunks for index in range(num_chunks + 1)]
        return self._call_workers(
            [
                (method, rows[begin:end], metadata[begin:end])
                for begin, end in itertools.pairwise(bounds)
            ]
        )

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
        [result] = self._call_workers([("global_post_process_and_metrics", batch)])
        processed, metrics = result
        return processed, metrics

    def shutdown(self) -> None:
        """Shut the environments down and end their processes; may be called again."""
        self._closed = True
        workers = [worker for worker in self._workers if worker is not None]
        self._workers = [None] * len(self._workers)
        if not workers or not ray.is_initialized():
            return
        refs = [worker.call.remote("shutdown") for worker in workers]
        ray.wait(refs, num_returns=len(refs), timeout=_SHUTDOWN_S)
        for worker in workers:
            _kill(worker)

    def __enter__(self) -> RemoteEnvironment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # Workers --------------------------------------------------------------------

    def _label(self, index: int) -> str:
        return f"environment {self.name!r}, worker {index} of {len(self._workers)}"

    def _start_missing(self) -> None:
        missing = [i for i, worker in enumerate(self._workers) if worker is None]
        if not missing:
            return
        init_ray()
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "max_restarts": 0}
        # Ray writes a runtime environment to its logs, so secrets go another way.
        secrets = secrets_of(self._env_vars)
        plain = {k: v for k, v in self._env_vars.items() if k not in secrets}
        if plain:
            options["runtime_env"] = {"env_vars": plain}
        actor_class = ray.remote(EnvironmentHost).options(**options)
        for index in missing:
            self._workers[index] = actor_class.remote(
                self._label(index), secrets, self._names
            )
        refs = {i: self._workers[i].load.remote(self._spec_pickle) for i in missing}
        try:
            answers, deaths = self._collect(refs, self._start_deadline_s, "start")
            if deaths:
                raise WorkerStartError(self._describe(deaths, "start"))
        except BaseException as error:
            self._drop([i for i in missing if self._workers[i] is not None])
            if isinstance(error, DeadlineExceededError):
                raise WorkerStartError(str(error)) from error
            raise
        self._abilities = answers[missing[0]]

    def _call_workers(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Make one call per worker; those of a worker that dies are made again."""
        if self._closed:
            raise WorkerDiedError(
                f"environment {self.name!r} was shut down; make a new one"
            )
        method = str(calls[0][0])
        values: dict[int, Any] = {}
        while len(values) < len(calls):
            self._start_missing()
            refs = {
                index: self._workers[index].call.remote(*call)
                for index, call in enumerate(calls)
                if index not in values
            }
            answers, deaths = self._collect(refs, self._deadline_s, method)
            values |= answers
            if deaths:
                self._report_deaths(deaths, method)
        self._num_deaths = 0
        return [values[index] for index in range(len(calls))]

    def _collect(
        self, refs: Mapping[int, Any], deadline_s: float, method: str
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Return what workers answered, and why others died; the dead are dropped."""
        _, late = ray.wait(
            list(refs.values()), num_returns=len(refs), timeout=deadline_s
        )
        outcomes: dict[int, Outcome] = {}
        deaths: dict[int, Exception] = {}
        for index, ref in refs.items():
            if ref in late:
                continue
            try:
                outcomes[index] = ray.get(ref, timeout=deadline_s)
            except _DEATHS as error:
                deaths[index] = error
        hung = [index for index, ref in refs.items() if ref in late]
        self._drop([*deaths, *hung])
        if hung:
            raise DeadlineExceededError(
                f"{', '.join(map(self._label, hung))}: no answer to {method} within "
                f"{deadline_s:g} s; the process was ended. Bound what the environment "
                "waits for, or raise the deadline"
            )
        for outcome in outcomes.values():
            if outcome.error is not None:
                raise outcome.error
        return {index: outcome.value for index, outcome in outcomes.items()}, deaths

    def _report_deaths(self, deaths: Mapping[int, Exception], method: str) -> None:
        """Log that dead workers are replaced, or raise once that happened too often."""
        self._num_deaths += 1
        said = self._describe(deaths, method)
        if self._num_deaths > self._max_restarts:
            raise WorkerDiedError(
                f"{said}. It was replaced {self._num_deaths - 1} times in a row "
                "(max_restarts); look for what ends it (memory, a crash in native code)"
            ) from next(iter(deaths.values()))
        _logger.warning(
            "%s. It is replaced, and its rows are sent again (%d of %d)",
            said,
            self._num_deaths,
            self._max_restarts,
        )

    def _describe(self, deaths: Mapping[int, Exception], method: str) -> str:
        labels = ", ".join(map(self._label, deaths))
        cause = cause_of_death(next(iter(deaths.values()))).rstrip(".")
        return f"{labels}: the process ended during {method}: {cause}"

    def _drop(self, indices: Sequence[int]) -> None:
        for index in indices:
            _kill(self._workers[index])
            self._workers[index] = None


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


def _kill(worker: Any) -> None:
    with contextlib.suppress(Exception):
        # The process may be gone already, or Ray itself.
        ray.kill(worker, no_restart=True)
