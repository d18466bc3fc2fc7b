"""Sums and products with a calculator as a tool: a small multi-turn world."""

from __future__ import annotations

from rl_envs.worlds.calculator.environment import (
    BracketCallParser,
    CalculatorConfig,
    CalculatorEnvironment,
    calculate,
)
from rl_envs.worlds.calculator.tasks import CalculatorTasks

__all__ = [
    "BracketCallParser",
    "CalculatorConfig",
    "CalculatorEnvironment",
    "CalculatorTasks",
    "calculate",
]
