"""Conversations scored one by one by many instances of several environments."""

from __future__ import annotations

from rl_envs.environment_pool.lane import LaneConfig
from rl_envs.environment_pool.pool import EnvironmentPool

__all__ = ["EnvironmentPool", "LaneConfig"]
