"""Texts that a regular expression matches, and expressions that match texts."""

from __future__ import annotations

from rl_envs.worlds.regex.environment import RegexConfig, RegexEnvironment
from rl_envs.worlds.regex.tasks import RegexTasks

__all__ = ["RegexConfig", "RegexEnvironment", "RegexTasks"]
