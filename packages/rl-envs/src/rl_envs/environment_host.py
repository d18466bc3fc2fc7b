"""The worker class of `RemoteEnvironment`; runs without Ray."""

from __future__ import annotations

import pickle
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_distributed.extras import installed_torch
from rl_distributed.registrations import Registration
from rl_envs.agents.tasks import AgentJob, AgentLimits, AgentPoll
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
)
from rl_envs.registry import EnvironmentSpec, env_registry, task_registry
from rl_envs.rewards.functional import FunctionalRewardWrapper

__all__ = ["Abilities", "DriverNames", "EnvironmentHost"]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an environment does besides judging rows."""

    post_processes: bool
    """It looks at finished batches."""
    scores_groups: bool
    """It judges the conversations of a prompt together."""
    checks_rows: bool
    """It finds rows that it cannot judge."""
    tools: list[dict[str, Any]]
    """The tools that it offers."""
    is_function: bool = False
    """It is a reward function: its answers hold numpy arrays, because its process has
    no need of torch, and its metrics are those of the rewards."""
    agents: AgentLimits | None = None
    """It runs agents, within these limits."""


@dataclass(frozen=True, slots=True)
class DriverNames:
    """What the driver's program has registered, beyond installed packages."""

    environments: Sequence[Registration] = ()
    task_sources: Sequence[Registration] = ()

    def adopt(self) -> None:
        """Make them known in this process."""
        env_registry.adopt(self.environments)
        task_registry.adopt(self.task_sources)


class EnvironmentHost:
    """Makes one environment and calls it.

    Args:
        spec_pickle: How to make it.
        names: What the driver has registered: an environment may make another by name.
    """

    def __init__(self, spec_pickle: bytes, names: DriverNames | None = None) -> None:
        if names is not None:
            names.adopt()
        try:
            spec: EnvironmentSpec = pickle.loads(spec_pickle)
            self._environment = spec.make()
        except ImportError as error:
            error.add_note(
                "What an environment or reward function needs must be importable in "
                "its process: install it, define it in the script itself, or have the "
                "environment's class declare an actor_environment"
            )
            raise
        # A subclass may do with tensors what it likes.
        self._is_function = type(self._environment) is FunctionalRewardWrapper
        if not self._is_function:
            # Answers hold tensors where there is torch. Its import takes seconds: they
            # pass while other workers start, and not within the first step.
            installed_torch()

    def abilities(self) -> Abilities:
        """Return what a caller must know of the environment."""
        made, base = type(self._environment), EnvironmentInterface
        post_process = base.global_post_process_and_metrics
        return Abilities(
            made.global_post_process_and_metrics is not post_process,
            made.score_groups is not base.score_groups,
            made.unusable_rows is not base.unusable_rows,
            self._environment.tool_schemas(),
            self._is_function,
            getattr(self._environment, "agent_limits", None),
        )

    def poll_agents(
        self,
        begin: Sequence[AgentJob],
        cancel: Sequence[int],
        wait_s: float,
    ) -> AgentPoll:
        """Begin and cancel jobs of agents, and return those that have ended."""
        environment: Any = self._environment
        found: AgentPoll = environment.poll_agents(begin, cancel, wait_s)
        return found

    def step(
        self, message_logs: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Judge rows."""
        if isinstance(self._environment, FunctionalRewardWrapper) and self._is_function:
            return self._environment.plain_step(message_logs, metadata)
        return self._environment.step(message_logs, metadata)

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """Judge the conversations of each prompt together."""
        return self._environment.score_groups(message_logs, metadata)

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Find rows that the environment cannot judge."""
        return self._environment.unusable_rows(metadata)

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Look at a finished batch."""
        return self._environment.global_post_process_and_metrics(batch)

    def shutdown(self) -> None:
        """Shut the environment down."""
        self._environment.shutdown()
