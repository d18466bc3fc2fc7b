"""Arithmetic with whole numbers: one answer is right, and it is compared exactly."""

from __future__ import annotations

from rl_envs.worlds.arithmetic.environment import (
    ArithmeticConfig,
    ArithmeticEnvironment,
)
from rl_envs.worlds.arithmetic.tasks import ArithmeticTasks

__all__ = ["ArithmeticConfig", "ArithmeticEnvironment", "ArithmeticTasks"]
