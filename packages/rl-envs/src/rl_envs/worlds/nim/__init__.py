"""Nim: a game against an opponent, of which every position is solved."""

from __future__ import annotations

from rl_envs.worlds.nim.environment import NimConfig, NimEnvironment
from rl_envs.worlds.nim.tasks import NimTasks

__all__ = ["NimConfig", "NimEnvironment", "NimTasks"]
