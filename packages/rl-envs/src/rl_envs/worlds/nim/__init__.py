"""Nim: a fully solved game against an opponent."""

from __future__ import annotations

from rl_envs.worlds.nim.environment import NimConfig, NimEnvironment
from rl_envs.worlds.nim.tasks import NimTasks

__all__ = ["NimConfig", "NimEnvironment", "NimTasks"]
