"""Several environments that score one conversation, each with a named reward."""

from __future__ import annotations

from rl_envs.worlds.multi_reward.environment import MultiRewardEnvironment
from rl_envs.worlds.multi_reward.reward_parts import (
    MultiRewardConfig,
    RewardPart,
    RewardPartConfig,
)

__all__ = [
    "MultiRewardConfig",
    "MultiRewardEnvironment",
    "RewardPart",
    "RewardPartConfig",
]
