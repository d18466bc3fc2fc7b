"""Gymnasium: environments with discrete, textual or short numeric actions, as games."""

from __future__ import annotations

from rl_envs.bridges.gymnasium.environment import (
    GymnasiumConfig,
    GymnasiumEnvironment,
)
from rl_envs.bridges.gymnasium.tasks import GymnasiumTasks

__all__ = ["GymnasiumConfig", "GymnasiumEnvironment", "GymnasiumTasks"]
