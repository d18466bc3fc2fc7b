"""From rewards to advantages.

An advantage belongs to a row: it is the same for each token of an answer.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rl_algorithms.advantages.baselines import calculate_baseline_and_std_per_group
from rl_algorithms.advantages.config import AdvantageConfig

__all__ = [
    "AdvantageEstimator",
    "GRPOAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "make_advantage_estimator",
]


class AdvantageEstimator(Protocol):
    """Turns the rewards of a batch into advantages."""

    def compute_advantage(
        self,
        rewards: Tensor,
        group_index: Tensor,
        valid_mask: Tensor | None = None,
        *,
        std_rewards: Tensor | None = None,
    ) -> Tensor:
        """Return [N] advantages, 0 where `valid_mask` is 0.

        Args:
            rewards: [N].
            group_index: [N] rows of one prompt share an index; equal prompts of
                different dataset rows do not.
            valid_mask: [N] 1 where the row counts; default all.
            std_rewards: [N] rewards before shaping, whose spread normalises.
        """
        ...


class GRPOAdvantageEstimator:
    """`(reward - baseline) / std` within the group of a prompt.

    Rows of a group without spread are not divided; their advantage is 0 anyway, up to
    rounding. See `advantages.baselines` for small groups.
    """

    def __init__(self, config: AdvantageConfig | None = None) -> None:
        self.config = config if config is not None else AdvantageConfig()

    def compute_advantage(
        self,
        rewards: Tensor,
        group_index: Tensor,
        valid_mask: Tensor | None = None,
        *,
        std_rewards: Tensor | None = None,
    ) -> Tensor:
        """See `AdvantageEstimator`."""
        cfg = self.config
        baseline, std = calculate_baseline_and_std_per_group(
            group_index,
            rewards.to(torch.float64),
            valid_mask,
            cfg.use_leave_one_out_baseline,
            None if std_rewards is None else std_rewards.to(torch.float64),
        )
        if cfg.normalize_over == "batch":
            _, std = calculate_baseline_and_std_per_group(
                torch.zeros_like(group_index),
                (rewards if std_rewards is None else std_rewards).to(torch.float64),
                valid_mask,
                leave_one_out_baseline=False,
            )
        advantages = rewards.to(torch.float64) - baseline
        if cfg.normalize_rewards:
            advantages = advantages / torch.where(std > 0, std, 1.0)
        return _finish(advantages, rewards, valid_mask, cfg)


class RawRewardAdvantageEstimator:
    """The reward itself: for rewards that are advantages already."""

    def __init__(self, config: AdvantageConfig | None = None) -> None:
        self.config = config if config is not None else AdvantageConfig()

    def compute_advantage(
        self,
        rewards: Tensor,
        group_index: Tensor,
        valid_mask: Tensor | None = None,
        *,
        std_rewards: Tensor | None = None,
    ) -> Tensor:
        """See `AdvantageEstimator`; groups and `std_rewards` play no part."""
        return _finish(rewards, rewards, valid_mask, self.config)


def _finish(
    advantages: Tensor,
    rewards: Tensor,
    valid_mask: Tensor | None,
    config: AdvantageConfig,
) -> Tensor:
    """Clip, blank the rows that do not count, return to the rewards' dtype."""
    low, high = config.advantage_clip_low, config.advantage_clip_high
    if low is not None or high is not None:
        advantages = advantages.clamp(low, high)
    if valid_mask is not None:
        advantages = torch.where(valid_mask != 0, advantages, 0.0)
    return advantages.to(
        rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    )


def make_advantage_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator that `config.name` names."""
    if config.name == "raw_reward":
        return RawRewardAdvantageEstimator(config)
    return GRPOAdvantageEstimator(config)
