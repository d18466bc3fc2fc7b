"""Trial of a reward function on one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_envs import check_reward_fn
from rl_envs.rewards.lists import RewardFns

__all__ = ["try_reward_fn"]


def try_reward_fn(reward_fn: RewardFns, datum: Mapping[str, Any]) -> None:
    """Call a reward function on one row, to find mistakes at once.

    Args:
        reward_fn: The function, or several.
        datum: A processed prompt.

    Raises:
        RewardError: It does not fit the rows, raises, or does not return a number.
    """
    log = [{"role": m["role"], "content": m["content"]} for m in datum["message_log"]]
    check_reward_fn(reward_fn, datum["extra_env_info"], prompt_messages=log)
