"""Preparation of rewards for the advantages: scaling, then shaping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_algorithms.advantages.checks import check_rewards
from rl_algorithms.advantages.config import RewardScalingConfig, RewardShapingConfig
from rl_algorithms.advantages.overlong import shape_rewards
from rl_algorithms.rollout.result import TrajectoryRows
from rl_distributed.metrics.values import Mean

__all__ = ["FinalRewards", "final_rewards", "scale_rewards"]


@dataclass(frozen=True)
class FinalRewards:
    """The rewards of a step from which advantages are computed."""

    values: Tensor
    """[N] rewards after scaling and shaping."""
    unshaped: Tensor
    """[N] rewards after scaling only."""
    metrics: dict[str, Mean]
    """Metrics of scaling and shaping."""


def final_rewards(
    rows: TrajectoryRows,
    scaling: RewardScalingConfig | None,
    shaping: RewardShapingConfig | None,
) -> FinalRewards:
    """Scale the rewards of a rollout, then apply the length penalties.

    Args:
        rows: Column `rewards`, and for shaping `generation_lengths` and `truncated`.
        scaling: Ranges; None for no scaling.
        shaping: Penalties; None for no shaping.
    """
    metrics: dict[str, Mean] = {}
    unshaped = rows["rewards"].to(torch.float32)
    if scaling is not None:
        unshaped, clamped = scale_rewards(unshaped, scaling)
        metrics["rewards_clamped_rate"] = Mean(float(clamped), float(len(unshaped)))
    values = unshaped
    if shaping is not None:
        lengths, truncated = rows["generation_lengths"], rows["truncated"]
        values = shape_rewards(unshaped, lengths, truncated, shaping)
        metrics["shaped_reward"] = Mean.of(values.tolist())
    return FinalRewards(values, unshaped, metrics)


def scale_rewards(rewards: Tensor, config: RewardScalingConfig) -> tuple[Tensor, int]:
    """Map rewards from the source range to the target range.

    Returns:
        The scaled rewards, and the number of rewards outside the source range.

    Raises:
        LossInputError: The rewards are not [N] numbers.
    """
    check_rewards(rewards)
    clamped = rewards.clamp(config.source_min, config.source_max)
    slope = (config.target_max - config.target_min) / (
        config.source_max - config.source_min
    )
    scaled = config.target_min + (clamped - config.source_min) * slope
    # The count is a metric: a wrong source range otherwise flattens rewards without a
    # sign.
    return scaled, int((clamped != rewards).sum())
