"""The worker class of `RemoteEnvironment`; runs without Ray."""

from __future__ import annotations

import pickle
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_distributed.errors import DeadlineExceededError
from rl_distributed.extras import installed_torch
from rl_distributed.registrations import Registration
from rl_envs.agents.tasks import (
    AgentJob,
    AgentLimits,
    AgentPoll,
    agent_limits_of,
)
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    has_own,
)
from rl_envs.registry import EnvironmentSpec, env_registry, task_registry
from rl_envs.rewards.functional import FunctionalRewardWrapper
from rl_envs.row_jobs import RowFailure, RowJob, RowPoll
from rl_envs.rows_in_flight import RowsInFlight
from rl_envs.task_limits import TaskLimits

__all__ = ["Abilities", "DriverNames", "EnvironmentHost", "TimedReturn"]


@dataclass(frozen=True, slots=True)
class Abilities:
    """Optional methods that an environment implements beside `step`."""

    post_processes: bool
    """It overrides `global_post_process_and_metrics`."""
    scores_groups: bool
    """It overrides `score_groups`."""
    checks_rows: bool
    """It overrides `unusable_rows`."""
    tools: list[dict[str, Any]]
    """Schemas of the tools that it offers."""
    is_function: bool = False
    """It is a reward function. Its replies hold numpy arrays, as its process does not
    import torch, and its metrics are computed from the rewards by the caller."""
    agents: AgentLimits | None = None
    """It runs agents, within these limits."""
    task_limits: TaskLimits = field(default_factory=TaskLimits)
    """Limits of each task."""
    resets: bool = False
    """It has a `reset` of its own."""
    closes: bool = False
    """It has a `close` of its own."""
    calls_at_once: int = 1
    """Number of concurrent calls that it takes."""


@dataclass(frozen=True, slots=True)
class TimedReturn:
    """What an environment returned for a batch, and how long it took."""

    value: EnvironmentReturn[Any]
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class DriverNames:
    """Names registered by the driver's program, beyond those of installed packages."""

    environments: Sequence[Registration] = ()
    task_sources: Sequence[Registration] = ()

    def adopt(self) -> None:
        """Register them in this process."""
        env_registry.adopt(self.environments)
        task_registry.adopt(self.task_sources)


class EnvironmentHost:
    """Creates one environment and calls it.

    Args:
        spec_pickle: The pickled `EnvironmentSpec`.
        names: The driver's registrations, as an environment may create another by name.
    """

    def __init__(self, spec_pickle: bytes, names: DriverNames | None = None) -> None:
        # Before the spec is unpickled: creating its environment may look names up.
        if names is not None:
            names.adopt()
        try:
            spec: EnvironmentSpec = pickle.loads(spec_pickle)
            self._environment = spec.make()
        except ImportError as error:
            error.add_note(
                "The imports of an environment or reward function must be available in "
                "its process: install the package, define the code in the script "
                "itself, or declare an actor_environment on the environment's class"
            )
            raise
        # Not isinstance: a subclass may use tensors, and then needs torch.
        self._is_function = type(self._environment) is FunctionalRewardWrapper
        if not self._is_function:
            # Replies hold tensors if torch is installed. Importing it takes seconds, so
            # do it now, while other workers start, rather than in the first step.
            installed_torch()
        self._rows = RowsInFlight(self._step_one)

    def abilities(self) -> Abilities:
        """Return which optional methods the environment implements."""
        made, base = type(self._environment), EnvironmentInterface
        post_process = base.global_post_process_and_metrics
        return Abilities(
            made.global_post_process_and_metrics is not post_process,
            made.score_groups is not base.score_groups,
            made.unusable_rows is not base.unusable_rows,
            self._environment.tool_schemas(),
            self._is_function,
            agent_limits_of(self._environment),
            self._environment.task_limits,
            has_own(self._environment, "reset"),
            has_own(self._environment, "close"),
            self._environment.calls_at_once,
        )

    def poll_agents(
        self,
        begin: Sequence[AgentJob],
        cancel: Sequence[int],
        wait_s: float,
    ) -> AgentPoll:
        """Begin and cancel jobs of agents, and return those that have ended."""
        # Only called for environments whose abilities include agents; the interface has
        # no such method.
        environment: Any = self._environment
        found: AgentPoll = environment.poll_agents(begin, cancel, wait_s)
        return found

    def poll_rows(
        self, begin: Sequence[RowJob], wait_s: float, limit_s: float
    ) -> RowPoll:
        """Begin to judge conversations, and return those that have ended.

        Args:
            begin: Conversations to begin with.
            wait_s: How long to wait for the first verdict, in seconds.
            limit_s: Time limit of a verdict. Those that take longer are failures, and
                their threads go on: the process is to be ended.
        """
        poll = self._rows.poll(begin, wait_s)
        late = [
            RowFailure(number, DeadlineExceededError(f"no verdict in {limit_s:g} s"))
            for number in self._rows.late(limit_s)
        ]
        return replace(poll, failures=[*poll.failures, *late])

    def _step_one(self, job: RowJob) -> EnvironmentReturn[Any]:
        return self.begin_and_step([job.log], [job.metadata], [job.seed])

    def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
        """Begin conversations."""
        if not has_own(self._environment, "reset"):
            return list(metadata)
        return list(self._environment.reset(metadata, seeds))

    def close(self, metadata: Sequence[Any]) -> None:
        """Release what is kept for conversations that have ended."""
        if has_own(self._environment, "close"):
            self._environment.close(metadata)

    def begin_and_step(
        self,
        message_logs: Sequence[MessageLog],
        metadata: Sequence[Any],
        seeds: Sequence[int | None],
    ) -> EnvironmentReturn[Any]:
        """Score rows, after beginning those with a seed."""
        rows = list(metadata)
        new = {row: seed for row, seed in enumerate(seeds) if seed is not None}
        begun = self.reset([rows[row] for row in new], list(new.values()))
        for row, value in zip(new, begun, strict=True):
            rows[row] = value
        return self._step(message_logs, rows)

    def step(
        self, message_logs: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> TimedReturn:
        """Score rows."""
        began_s = time.monotonic()
        value = self._step(message_logs, metadata)
        return TimedReturn(value, time.monotonic() - began_s)

    def _step(
        self, message_logs: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        if isinstance(self._environment, FunctionalRewardWrapper) and self._is_function:
            return self._environment.plain_step(message_logs, metadata)
        return self._environment.step(message_logs, metadata)

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """Score the conversations of each prompt together."""
        return self._environment.score_groups(message_logs, metadata)

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Find rows that the environment cannot score."""
        return self._environment.unusable_rows(metadata)

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Post-process a finished batch."""
        return self._environment.global_post_process_and_metrics(batch)

    def shutdown(self) -> None:
        """Shut the environment down."""
        self._environment.shutdown()
