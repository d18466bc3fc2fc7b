"""Reasoning Gym: a hundred families of tasks, with curricula and scorers."""

from __future__ import annotations

from rl_envs.bridges.reasoning_gym.environment import (
    ReasoningGymConfig,
    ReasoningGymEnvironment,
)
from rl_envs.bridges.reasoning_gym.tasks import ReasoningGymTasks

__all__ = ["ReasoningGymConfig", "ReasoningGymEnvironment", "ReasoningGymTasks"]
