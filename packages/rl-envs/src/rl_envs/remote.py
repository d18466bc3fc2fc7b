"""`RemoteEnvironment`: an environment in processes of its own.

```
step(B rows) --chunks--> [EnvironmentHost] x num_workers --> EnvironmentReturn
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | rows | the result | all workers | their answers, a death, the deadline |
| worker | a chunk | its answer | the environment | the environment, or being killed |

A worker that dies or misses the deadline is killed, reported, and started anew for the
next call. `shutdown` asks every environment to shut down, briefly, then kills the
workers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import ray
import torch
from ray import cloudpickle

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerStartError,
)
from rl_distributed.logging import get_logger
from rl_distributed.ray_start import init_ray
from rl_envs.environment_host import Abilities, EnvironmentHost, Outcome
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    num_rows,
)
from rl_envs.registry import EnvFactory, EnvironmentSpec, EnvSettings
from rl_envs.reward_lists import RewardFns

__all__ = ["RemoteEnvironment", "join_returns"]

_logger = get_logger(__name__)
_SHUTDOWN_S = 5.0


def join_returns(
    parts: Sequence[EnvironmentReturn[Any]],
) -> EnvironmentReturn[Any]:
    """Put the answers to consecutive chunks of a batch together.

    Raises:
        EnvironmentContractError: The chunks have different rewards.
    """
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
        terminateds=torch.cat([part.terminateds for part in parts]),
        answers=answers,
    )


def _join_rewards(parts: Sequence[EnvironmentReturn[Any]]) -> Rewards:
    rewards = [part.rewards for part in parts]
    named = [part for part in rewards if isinstance(part, dict)]
    if not named:
        return torch.cat([part for part in rewards if isinstance(part, torch.Tensor)])
    names = list(named[0])
    columns: list[dict[str, torch.Tensor]] = []
    for part in parts:
        values = part.rewards
        if isinstance(values, torch.Tensor) and _knows_no_name(values, part):
            values = dict.fromkeys(names, values)
        if not isinstance(values, dict) or set(values) != set(names):
            got = sorted(values) if isinstance(values, dict) else "one reward per row"
            raise EnvironmentContractError(
                f"an environment must give the same rewards for every row: got {got} "
                f"and {sorted(names)} in one batch"
            )
        columns.append(values)
    return {name: torch.cat([column[name] for column in columns]) for name in names}


def _knows_no_name(rewards: torch.Tensor, part: EnvironmentReturn[Any]) -> bool:
    """Whether no row of a chunk was scored: all failed, or go on without a reward."""
    return bool((rewards.isnan() | (~part.terminateds & (rewards == 0))).all())


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
        env_vars: Environment variables of the workers.
        max_restarts: How many workers may be started anew, in all, before a death
            counts as lasting.

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
        spec = EnvironmentSpec.of(env, config)
        self.name = spec.name
        self._spec_pickle = _pickle(spec)
        self._num_cpus = num_cpus
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._env_vars = dict(env_vars or {})
        self._restarts_left = max_restarts
        self._abilities = Abilities(False, False, [])
        self._workers: list[Any] = [None] * num_workers
        self._started = False
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
            WorkerDiedError: The process of a worker is gone.
            DeadlineExceededError: A worker did not answer in time.
        """
        num_rows(message_log_batch, metadata)
        logs = [_as_text(log) for log in message_log_batch]
        return join_returns(self._call_in_chunks("step", logs, list(metadata)))

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
        if self._started:
            if len(missing) > self._restarts_left:
                raise WorkerDiedError(
                    f"{self._label(missing[0])} is gone and was started anew too "
                    "often; look for what ends it (memory, a crash in native code, a "
                    "deadline that is too short), or raise max_restarts"
                )
            self._restarts_left -= len(missing)
        init_ray()
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "max_restarts": 0}
        if self._env_vars:
            options["runtime_env"] = {"env_vars": self._env_vars}
        actor_class = ray.remote(EnvironmentHost).options(**options)
        for index in missing:
            self._workers[index] = actor_class.remote(self._label(index))
        refs = {i: self._workers[i].load.remote(self._spec_pickle) for i in missing}
        try:
            answers = self._collect(refs, self._start_deadline_s, "start")
        except BaseException as error:
            self._drop([i for i in missing if self._workers[i] is not None])
            if isinstance(error, (WorkerDiedError, DeadlineExceededError)):
                raise WorkerStartError(str(error)) from error
            raise
        self._abilities = answers[0]
        self._started = True

    def _call_workers(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self._closed:
            raise WorkerDiedError(
                f"environment {self.name!r} was shut down; make a new one"
            )
        self._start_missing()
        refs = {
            index: self._workers[index].call.remote(*call)
            for index, call in enumerate(calls)
        }
        return self._collect(refs, self._deadline_s, str(calls[0][0]))

    def _collect(
        self, refs: Mapping[int, Any], deadline_s: float, method: str
    ) -> list[Any]:
        try:
            outcomes: list[Outcome] = ray.get(list(refs.values()), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            late = self._drop_unfinished(refs)
            raise DeadlineExceededError(
                f"{', '.join(self._label(i) for i in late)}: no answer to {method} "
                f"within {deadline_s:g} s; the process was ended. Bound what the "
                "environment waits for, or raise the deadline"
            ) from error
        except ray.exceptions.RayActorError as error:
            dead = self._drop_dead(refs)
            raise WorkerDiedError(
                f"{', '.join(self._label(i) for i in dead)}: the process ended during "
                f"{method}: {error}"
            ) from error
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def _drop(self, indices: Sequence[int]) -> None:
        for index in indices:
            _kill(self._workers[index])
            self._workers[index] = None

    def _drop_unfinished(self, refs: Mapping[int, Any]) -> list[int]:
        done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)
        late = [index for index, ref in refs.items() if ref not in done]
        self._drop(late)
        # An answer that came in the very last moment: name everybody who was asked.
        return late or list(refs)

    def _drop_dead(self, refs: Mapping[int, Any]) -> list[int]:
        dead: list[int] = []
        for index, ref in refs.items():
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.RayActorError:
                dead.append(index)
            except Exception as error:
                _logger.debug("%s is still busy: %s", self._label(index), error)
        self._drop(dead)
        return dead


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
