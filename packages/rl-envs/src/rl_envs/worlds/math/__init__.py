"""Mathematical problems: an answer is right if it means the same as the solution."""

from __future__ import annotations

from rl_envs.worlds.math.environment import MathConfig, MathEnvironment

__all__ = ["MathConfig", "MathEnvironment"]
