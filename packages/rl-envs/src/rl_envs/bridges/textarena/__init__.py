"""TextArena: games of one and two players, against moves drawn or a served model."""

from __future__ import annotations

from rl_envs.bridges.textarena.environment import (
    TextArenaConfig,
    TextArenaEnvironment,
)
from rl_envs.bridges.textarena.opponents import ServedPlayer
from rl_envs.bridges.textarena.tasks import TextArenaTasks

__all__ = ["ServedPlayer", "TextArenaConfig", "TextArenaEnvironment", "TextArenaTasks"]
