"""Reaching a target by arithmetic with given numbers; many answers are right."""

from __future__ import annotations

from rl_envs.worlds.countdown.environment import (
    CountdownConfig,
    CountdownEnvironment,
)
from rl_envs.worlds.countdown.tasks import CountdownTasks

__all__ = ["CountdownConfig", "CountdownEnvironment", "CountdownTasks"]
