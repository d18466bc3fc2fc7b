"""Data that are smaller than a step, and the trial of a reward function on them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from rl_algorithms.data.config import DataConfig
from rl_distributed.logging import get_logger
from rl_envs import check_reward_fn
from rl_envs.reward_lists import RewardFns

__all__ = ["keep_small_data", "try_reward_fn"]

_logger = get_logger(__name__)


def keep_small_data(config: DataConfig, dataset: Any, batch_size: int) -> DataConfig:
    """Return a configuration that uses few rows at all.

    By default an incomplete last batch is dropped. Rows in memory that do not fill one
    step would leave nothing, so they make a smaller step, unless `drop_last` was set.
    """
    small = (
        isinstance(dataset, Sized)
        and not isinstance(dataset, str)
        and 0 < len(dataset) < batch_size
    )
    if not small or "drop_last" in config.model_fields_set:
        return config
    _logger.info(
        "the data have %d rows, less than a step takes (%d): a step takes all of them",
        len(dataset),
        batch_size,
    )
    return config.replace(drop_last=False)


def try_reward_fn(reward_fn: RewardFns, datum: Mapping[str, Any]) -> None:
    """Call a reward function on one row, so that mistakes show at once.

    Args:
        reward_fn: The function, or several.
        datum: A processed prompt.

    Raises:
        RewardError: It does not fit the rows, raises, or returns no number.
    """
    log = [{"role": m["role"], "content": m["content"]} for m in datum["message_log"]]
    check_reward_fn(reward_fn, datum["extra_env_info"], prompt_messages=log)
