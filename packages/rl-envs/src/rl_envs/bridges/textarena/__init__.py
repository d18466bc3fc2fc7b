"""TextArena: games of one and two players, against moves, a model, or the policy."""

from __future__ import annotations

from rl_envs.bridges.textarena.environment import (
    TextArenaConfig,
    TextArenaEnvironment,
)
from rl_envs.bridges.textarena.opponents import ServedPlayer
from rl_envs.bridges.textarena.self_play import SelfPlayConfig, TextArenaSelfPlay
from rl_envs.bridges.textarena.tasks import TextArenaTasks

__all__ = [
    "SelfPlayConfig",
    "ServedPlayer",
    "TextArenaConfig",
    "TextArenaEnvironment",
    "TextArenaSelfPlay",
    "TextArenaTasks",
]
