"""Reward scaling and length penalties, applied before advantages are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.advantages.checks import check_rewards
from rl_algorithms.advantages.config import RewardScalingConfig, RewardShapingConfig

__all__ = ["scale_rewards", "shape_rewards"]


def scale_rewards(rewards: Tensor, config: RewardScalingConfig) -> tuple[Tensor, int]:
    """Map rewards from the source range to the target range.

    Returns:
        The scaled rewards, and how many lay outside the source range.

    Raises:
        LossInputError: The rewards are no [N] numbers.
    """
    check_rewards(rewards)
    clamped = rewards.clamp(config.source_min, config.source_max)
    slope = (config.target_max - config.target_min) / (
        config.source_max - config.source_min
    )
    scaled = config.target_min + (clamped - config.source_min) * slope
    return scaled, int((clamped != rewards).sum())


def shape_rewards(
    rewards: Tensor,
    generation_lengths: Tensor,
    truncated: Tensor,
    config: RewardShapingConfig,
) -> Tensor:
    """Apply the length penalties.

    Args:
        rewards: [N].
        generation_lengths: [N] sampled tokens of all turns.
        truncated: [N] whether the answer was cut off.
        config: Which penalty.

    Raises:
        LossInputError: The columns do not belong to the same rows.
    """
    check_rewards(rewards, generation_lengths=generation_lengths, truncated=truncated)
    if config.stop_properly_penalty_coef is not None:
        return torch.where(
            truncated.bool(), rewards * config.stop_properly_penalty_coef, rewards
        )
    if config.max_response_length is None:
        return rewards
    free = config.max_response_length - config.overlong_buffer_length
    excess = (generation_lengths.to(rewards.dtype) - free).clamp(min=0)
    part = (excess / config.overlong_buffer_length).clamp(max=1)
    return rewards - part * config.overlong_buffer_penalty
