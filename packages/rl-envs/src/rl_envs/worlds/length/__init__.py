"""Texts with a length within bounds."""

from __future__ import annotations

from rl_envs.worlds.length.environment import LengthConfig, LengthEnvironment
from rl_envs.worlds.length.tasks import LengthTasks

__all__ = ["LengthConfig", "LengthEnvironment", "LengthTasks"]
