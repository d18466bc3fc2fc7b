"""The environment that runs rollouts of verifiers against the policy."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_envs.agents.environment import AgentEnvironment
from rl_envs.agents.functions import RunAgent
from rl_envs.agents.runner import Reward
from rl_envs.agents.tasks import AgentReward, AgentTask
from rl_envs.bridges.verifiers.config import VerifiersConfig
from rl_envs.bridges.verifiers.host_process import HostProcess
from rl_envs.errors import AgentError
from rl_envs.registry import register_env

__all__ = ["INPUT", "VerifiersEnvironment"]

INPUT = "verifiers_input"
"""Column with a row of the environment's data set, as a JSON object."""


@register_env("verifiers")
class VerifiersEnvironment(AgentEnvironment):
    """Runs rollouts of an environment of verifiers, which ask the policy by themselves.

    Rows come from `VerifiersTasks`. The reward is that of the environment's rubric; its
    metrics are the parts of it.

    Args:
        config: The settings.
    """

    config_class = VerifiersConfig
    builds_its_extra = True

    def __init__(self, config: VerifiersConfig) -> None:
        self._settings = config
        self._begin(config)

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes cannot be pickled; a copy starts its own.
        return VerifiersEnvironment, (self._settings,)

    def _begin(self, config: Any) -> None:
        super()._begin(config)
        self._host = HostProcess(self._settings)

    def _run_agent(self) -> RunAgent:
        host, settings = self._host, self._settings

        async def run(task: AgentTask, base_url: str, api_key: str) -> Any:
            request = {
                "do": "rollout",
                "input": _input_of(task.columns),
                "base_url": base_url,
                "api_key": api_key,
                "model": task.model,
                "sampling": settings.sampling,
            }
            # In a thread: the first one waits until the environment is loaded.
            number, future = await asyncio.to_thread(host.submit, request)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                host.cancel(number)
                raise

        return run

    def _read_reward(self) -> Reward:
        async def read(task: AgentTask, value: Any) -> AgentReward:
            return _reward_of(value)

        return read

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Return the rows that `VerifiersTasks` has not written."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                _input_of(columns)
            except AgentError as error:
                found[row] = f"metadata[{row}]: {error}"
        return found

    def shutdown(self) -> None:
        """End all rollouts, and the process of the environment."""
        super().shutdown()
        self._host.close()


def _input_of(columns: Any) -> dict[str, Any]:
    given = columns.get(INPUT) if isinstance(columns, Mapping) else None
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not isinstance(found, Mapping) or "prompt" not in found:
        raise AgentError(
            f"column {INPUT!r} must be a JSON object with a prompt, as VerifiersTasks "
            f"writes it: got {given!r:.120}"
        )
    return dict(found)


def _reward_of(output: Mapping[str, Any]) -> AgentReward:
    reward, metrics = output["reward"], output["metrics"]
    if not _is_number(reward):
        raise AgentError(
            f"the environment of verifiers must give a finite reward: got {reward!r}"
        )
    parts = {
        str(name): float(part) for name, part in metrics.items() if _is_number(part)
    }
    return AgentReward(float(reward), parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
