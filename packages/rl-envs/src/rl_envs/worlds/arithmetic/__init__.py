"""Arithmetic with whole numbers, with a single right answer, compared exactly."""

from __future__ import annotations

from rl_envs.worlds.arithmetic.environment import (
    ArithmeticConfig,
    ArithmeticEnvironment,
)
from rl_envs.worlds.arithmetic.tasks import ArithmeticTasks

__all__ = ["ArithmeticConfig", "ArithmeticEnvironment", "ArithmeticTasks"]
