"""Texts for regular expressions, and regular expressions for texts."""

from __future__ import annotations

from rl_envs.worlds.regex.environment import RegexConfig, RegexEnvironment
from rl_envs.worlds.regex.tasks import RegexTasks

__all__ = ["RegexConfig", "RegexEnvironment", "RegexTasks"]
