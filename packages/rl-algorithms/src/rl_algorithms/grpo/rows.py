"""From scored answers to rows that can be trained on: pure functions."""

from __future__ import annotations

from typing import Any

import torch

from rl_algorithms.advantages import AdvantageEstimator, scale_rewards, shape_rewards
from rl_algorithms.filters import mask_overlong, rows_with_variance
from rl_algorithms.grpo.config import GRPOSettings
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.metrics.values import Mean

__all__ = ["build_rows"]

_COLUMNS = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "generation_logprobs",
)


def build_rows(
    rows: BatchedDataDict[Any],
    estimator: AdvantageEstimator,
    settings: GRPOSettings,
) -> tuple[BatchedDataDict[Any] | None, dict[str, Any]]:
    """Give each row its advantage, and leave out the rows that do not count.

    Args:
        rows: Columns of `RolloutResult.rows`.
        estimator: Makes advantages of rewards.
        settings: Scaling, shaping and filters.

    Returns:
        The columns that training needs, or None when no row is left, and metrics.
    """
    metrics: dict[str, Any] = {}
    rewards = rows["rewards"].to(torch.float32)
    if settings.reward_scaling is not None:
        rewards, clamped = scale_rewards(rewards, settings.reward_scaling)
        metrics["rewards_clamped_rate"] = Mean(float(clamped), float(len(rewards)))
    unshaped = rewards
    if settings.reward_shaping is not None:
        rewards = shape_rewards(
            rewards,
            rows["generation_lengths"],
            rows["truncated"],
            settings.reward_shaping,
        )
        metrics["shaped_reward"] = Mean.of(rewards.tolist())
    valid, groups = rows["sample_mask"], rows["group_index"]
    advantages = estimator.compute_advantage(
        rewards,
        groups,
        valid,
        std_rewards=None if settings.reward_shaping is None else unshaped,
    )
    varied = rows_with_variance(rewards, groups, valid)
    metrics["zero_variance_rate"] = 1.0 - float(varied.float().mean())
    metrics |= _advantage_metrics(advantages, valid)
    keep = valid != 0
    if settings.overlong_filtering:
        kept, dropped = mask_overlong(valid, rows["truncated"])
        keep &= kept != 0
        metrics["overlong_filtered_rate"] = dropped / len(rewards)
    if settings.drop_zero_variance_groups:
        keep &= varied
    train: BatchedDataDict[Any] = BatchedDataDict(
        {name: rows[name] for name in _COLUMNS if name in rows}
    )
    train["advantages"] = advantages
    return _select(train, keep), metrics


def _select(
    rows: BatchedDataDict[Any], keep: torch.Tensor
) -> BatchedDataDict[Any] | None:
    if bool(keep.all()):
        return rows
    indices = keep.nonzero().flatten()
    if not len(indices):
        return None
    rows = rows.select_indices(indices)
    # What was cut off may have been the widest row.
    width = int(rows["input_lengths"].max())
    for name in ("input_ids", "token_mask", "generation_logprobs"):
        if name in rows:
            rows[name] = rows[name][:, :width]
    return rows


def _advantage_metrics(advantages: torch.Tensor, valid: torch.Tensor) -> dict[str, Any]:
    counted = advantages[valid != 0]
    if not len(counted):
        return {}
    low, mean, high = torch.stack(
        (counted.min(), counted.mean(), counted.max())
    ).tolist()
    return {
        "advantages/min": low,
        "advantages/mean": mean,
        "advantages/max": high,
    }
