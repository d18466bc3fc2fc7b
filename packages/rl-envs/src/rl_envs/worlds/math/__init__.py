"""Mathematical problems, with answers compared by their meaning."""

from __future__ import annotations

from rl_envs.worlds.math.environment import MathConfig, MathEnvironment

__all__ = ["MathConfig", "MathEnvironment"]
