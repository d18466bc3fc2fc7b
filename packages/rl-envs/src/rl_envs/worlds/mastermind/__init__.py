"""Mastermind: guessing a secret code from exact feedback."""

from __future__ import annotations

from rl_envs.worlds.mastermind.environment import (
    MastermindConfig,
    MastermindEnvironment,
)
from rl_envs.worlds.mastermind.tasks import MastermindTasks

__all__ = ["MastermindConfig", "MastermindEnvironment", "MastermindTasks"]
