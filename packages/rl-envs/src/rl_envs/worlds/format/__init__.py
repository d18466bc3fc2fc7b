"""Responses with required sections, in order, each once."""

from __future__ import annotations

from rl_envs.worlds.format.environment import FormatConfig, FormatEnvironment
from rl_envs.worlds.format.tasks import FormatTasks

__all__ = ["FormatConfig", "FormatEnvironment", "FormatTasks"]
