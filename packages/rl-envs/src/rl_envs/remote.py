"""`RemoteEnvironment`: an environment in a worker group of its own.

```
step(B rows) --chunks--> RayWorkerGroup of EnvironmentHost --> EnvironmentReturn
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | rows | the result | all workers | their replies, a death, the deadline |
| worker | a chunk | its reply | the environment | the environment, or being killed |

`EnvironmentWorkers` owns the group and decides what happens after a death. Calls from
several threads share the workers: each uses those that are idle, or fewer if its rows
take less time than the calls of more workers would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_envs.agents.tasks import AgentJob, AgentLimits, AgentPoll
from rl_envs.environment_host import Abilities
from rl_envs.environment_workers import EnvironmentWorkers
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    as_columns,
    log_as_text,
    num_rows,
)
from rl_envs.joined_returns import join_returns
from rl_envs.metrics import reward_metrics
from rl_envs.registry import EnvFactory, EnvironmentSpec, EnvSettings
from rl_envs.rewards.lists import RewardFns
from rl_envs.row_jobs import RowJob, RowPoll
from rl_envs.task_limits import TaskLimits

__all__ = ["RemoteEnvironment"]

_ROWS_PER_CHECK = 256
# Least duration of a chunk: the call of a worker costs one or two milliseconds of
# processor time.
_LEAST_CHUNK_S = 0.01
# Weight of the newest call in the moving average of a row's duration.
_NEWEST_SHARE = 0.2


class RemoteEnvironment(EnvironmentInterface[Any]):
    """Runs an environment in a group of workers, behind the same interface.

    Ray is started on this machine if it is not running. Only the `role` and `content`
    of messages are sent. If the environment's class declares an `actor_environment` (or
    one is declared for it), its workers run there, with the packages that it needs.

    Args:
        env: A registered name, an environment class, an environment (each worker gets
            a copy), or a reward function (or several), which may be a lambda.
        config: Settings for a name or class; for a function, arguments of its wrapper.
        num_workers: Number of processes that share the rows of a batch.
        num_cpus: CPUs that Ray reserves for each; 0 fits into a full cluster.
        deadline_s: Time limit of a call, in seconds.
        start_deadline_s: Time limit for the workers to start, in seconds.
        env_vars: Environment variables of the workers. Those whose names look like
            secrets are set before the environment is created and never reach a Ray log.
        max_restarts: Number of consecutive failed attempts after which a death is
            raised; until then dead workers are replaced and their rows resent. A call
            that succeeds resets the count. 0: the first death is an error.
        task_limits: Limits of each task, in place of those of the environment's class.

    Raises:
        UserError: The name, settings or function are wrong, or the class declares an
            environment that cannot be built.
        WorkerStartError: A worker does not start.
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
        task_limits: TaskLimits | None = None,
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
        self._workers = EnvironmentWorkers(
            spec,
            num_workers=num_workers,
            num_cpus=num_cpus,
            deadline_s=deadline_s,
            start_deadline_s=start_deadline_s,
            env_vars=env_vars,
            max_restarts=max_restarts,
        )
        try:
            # Asked once, of one worker: all hold the same environment.
            [abilities] = self._workers.call({0: {}}, "abilities", start_deadline_s)
        except BaseException:
            self.shutdown()
            raise
        self._abilities: Abilities = abilities
        self.task_limits = (task_limits or TaskLimits()).over(abilities.task_limits)

    @property
    def calls_at_once(self) -> int:  # type: ignore[override]
        """Number of concurrent calls: one per worker, as each uses the idle ones."""
        return len(self._workers)

    def has_own(self, method: str) -> bool:
        """Return whether the workers' environment has its own `reset` or `close`."""
        abilities = self._abilities
        return abilities.resets if method == "reset" else abilities.closes

    # Calls ----------------------------------------------------------------------

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Score a batch, split among the workers.

        Fewer of them are used if a chunk would take less time than its call.

        Raises:
            UserError: The environment raised it.
            WorkerMethodError: The environment raised anything else; the message has
                the worker's own traceback.
            WorkerDiedError: A worker's process died, and so did its replacements.
            WorkerStartError: A dead worker could not be replaced.
            DeadlineExceededError: A worker did not reply in time.
        """
        # Checked here, since chunks of unequal lists would fail in a worker with a
        # message about the chunk.
        num_rows(message_log_batch, metadata)
        logs = [log_as_text(log) for log in message_log_batch]
        rows = {"message_logs": logs, "metadata": list(metadata)}
        size, row_s = len(logs), self.row_s
        most = size
        if row_s is not None and row_s < _LEAST_CHUNK_S:
            most = math.ceil(size * row_s / _LEAST_CHUNK_S)
        timed = self._call_in_chunks("step", rows, most)
        if size:
            self._note_duration(sum(part.elapsed_s for part in timed) / size)
        joined = join_returns([part.value for part in timed])
        # Processes of reward functions run without torch; convert in this one.
        return as_columns(joined) if self._abilities.is_function else joined

    def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
        """Begin conversations, split among the workers, if the environment has to.

        Raises:
            As `step`.
        """
        if not self._abilities.resets:
            return list(metadata)
        rows = {"metadata": list(metadata), "seeds": list(seeds)}
        return [row for part in self._call_in_chunks("reset", rows) for row in part]

    def close(self, metadata: Sequence[Any]) -> None:
        """Release conversations in all workers, if their environments keep anything.

        Raises:
            As `step`.
        """
        if self._abilities.closes and metadata:
            # Which worker keeps something for which conversation, nobody notes.
            rows = {"metadata": list(metadata)}
            self._workers.call(dict.fromkeys(range(len(self._workers)), rows), "close")

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """Score the conversations of each prompt, prompts split among the workers.

        Raises:
            As `step`.
        """
        if not self._abilities.scores_groups:
            return None
        groups = [[log_as_text(log) for log in group] for group in message_logs]
        rows = {"message_logs": groups, "metadata": [*map(list, metadata)]}
        parts = self._call_in_chunks("score_groups", rows)
        if any(part is None for part in parts):
            # A wrapper implements the method, but the environment inside it does not.
            return None
        return [rewards for part in parts for rewards in part]

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Find unusable rows of a data set, split among the workers.

        Raises:
            As `step`.
        """
        found: dict[int, str] = {}
        if not self._abilities.checks_rows:
            return found
        size = len(self._workers)
        # A call has a deadline, a data set no size limit: send few rows at a time.
        for first in range(0, len(metadata), size * _ROWS_PER_CHECK):
            rows = metadata[first : first + size * _ROWS_PER_CHECK]
            parts = [rows[index::size] for index in range(min(size, len(rows)))]
            answers = self._workers.call(
                {index: {"metadata": part} for index, part in enumerate(parts)},
                "unusable_rows",
            )
            for index, answer in enumerate(answers):
                # Worker i got every size-th row from i on; undo that.
                for place, reason in answer.items():
                    found[first + index + place * size] = reason
        # Workers reply for interleaved rows, but readers expect the order of the data
        # set.
        return dict(sorted(found.items()))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools that the environment reported when its workers started."""
        return list(self._abilities.tools)

    def _call_in_chunks(
        self, method: str, rows: Mapping[str, list[Any]], most: int | None = None
    ) -> list[Any]:
        """Call a method with consecutive chunks of the rows, one per idle worker.

        Args:
            method: Name of a method of `EnvironmentHost`.
            rows: Its arguments, lists of one length.
            most: Number of chunks at most; None: one for each row.
        """
        size = len(rows["metadata"])
        with self._workers.taken(size if most is None else most) as workers:
            num_chunks = len(workers)
            # Bounds by multiplication, not a fixed chunk size: sizes differ by at most
            # one row, so no worker idles while another has twice its share.
            bounds = [size * place // num_chunks for place in range(num_chunks + 1)]
            parts = zip(workers, itertools.pairwise(bounds), strict=True)
            chunks = {
                index: {name: values[begin:end] for name, values in rows.items()}
                for index, (begin, end) in parts
            }
            return self._workers.call(chunks, method)

    def _note_duration(self, row_s: float) -> None:
        # A slow row counts for many calls, as slow ones tend to come in groups. Threads
        # may overwrite each other's change, which only delays the mean.
        before = row_s if self.row_s is None else self.row_s
        self.row_s = before + _NEWEST_SHARE * (row_s - before)

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Post-process the whole batch in one idle worker, if its environment can.

        Raises:
            As `step`.
        """
        # Decided here where possible: the batch of a step is large, and most
        # environments would send it back unchanged.
        if self._abilities.is_function:
            return batch, reward_metrics(batch)
        if not self._abilities.post_processes:
            return super().global_post_process_and_metrics(batch)
        with self._workers.taken(1) as (index,):
            [result] = self._workers.call(
                {index: {"batch": batch}}, "global_post_process_and_metrics"
            )
        processed, metrics = result
        return processed, metrics

    @property
    def agent_limits(self) -> AgentLimits | None:
        """What bounds its agents; None: it judges answers instead."""
        return self._abilities.agents

    @property
    def num_agent_workers(self) -> int:
        """Processes that run agents."""
        return len(self._workers)

    def poll_agents(
        self,
        begin: Sequence[AgentJob],
        cancel: Sequence[int],
        wait_s: float,
        worker: int = 0,
    ) -> AgentPoll:
        """Begin and cancel jobs of a worker, and return those that have ended.

        Raises:
            As `step`.
        """
        arguments = {
            "begin": list(begin),
            "cancel": list(cancel),
            "wait_s": wait_s,
        }
        [found] = self._workers.call({worker: arguments}, "poll_agents")
        polled: AgentPoll = found
        return polled

    @property
    def num_row_workers(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def rows_per_worker(self) -> int:
        """Conversations that a worker judges at a time, by `calls_at_once` of the env.

        1 for environments that run agents, which answer to `poll_agents`.
        """
        abilities = self._abilities
        return 1 if abilities.agents is not None else abilities.calls_at_once

    def poll_rows(
        self, begin: Sequence[RowJob], wait_s: float, worker: int = 0
    ) -> RowPoll:
        """Begin to judge conversations in a worker, and return those that have ended.

        A conversation that takes longer than `deadline_s` fails, and the process of its
        worker is replaced: the others there are lost, as `RowPoll.process` shows.

        Args:
            begin: Conversations to begin with, at most `rows_per_worker` at a time.
            wait_s: How long to wait for the first verdict, in seconds.
            worker: Index of the worker.

        Raises:
            As `step`.
        """
        limit_s = self._workers.deadline_s
        arguments = {
            "begin": [replace(job, log=log_as_text(job.log)) for job in begin],
            "wait_s": wait_s,
            "limit_s": limit_s,
        }
        poll: RowPoll
        [poll] = self._workers.call({worker: arguments}, "poll_rows")
        if any(isinstance(f.error, DeadlineExceededError) for f in poll.failures):
            self._workers.end(worker, f"a conversation took longer than {limit_s:g} s")
        return poll

    def shutdown(self) -> None:
        """Shut the environments down and stop their processes; safe to call again."""
        self._workers.shutdown()

    def __enter__(self) -> RemoteEnvironment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
