"""From scored answers to rows that can be trained on: pure functions.

Shapes: N conversations, T tokens of the longest one; R rows, S tokens wide. Without
branches R is N and S is T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_algorithms.advantages import (
    AdvantageEstimator,
    RewardColumns,
    scale_rewards,
    shape_rewards,
)
from rl_algorithms.filters import (
    mask_overlong,
    mask_sequence_logprob_error,
    named_rewards,
    rows_with_variance,
)
from rl_algorithms.grpo.config import GRPOSettings
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.kl import calculate_kl
from rl_algorithms.rollout.timeline import Timeline
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError
from rl_distributed.metrics.values import Mean

__all__ = ["add_kl_penalty", "build_rows", "mask_disagreement"]

_COLUMNS = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "generation_logprobs",
    "prev_logprobs",
)


def add_kl_penalty(
    rows: BatchedDataDict[Any], config: ClippedPGLossConfig
) -> dict[str, Any]:
    """Add column `kl_penalty` [R, S]: what each token's KL takes from the reward.

    Args:
        rows: Columns `prev_logprobs`, `reference_policy_logprobs` and `token_mask`.
        config: Estimator, bounds and weight.

    Returns:
        Metrics.
    """
    trained = rows["token_mask"] != 0
    kl = calculate_kl(
        torch.where(trained, rows["prev_logprobs"], 0.0),
        torch.where(trained, rows["reference_policy_logprobs"], 0.0),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
    )
    rows["kl_penalty"] = config.reference_policy_kl_penalty * kl
    counted = trained * rows["sample_mask"].unsqueeze(1)
    return {"kl_penalty": Mean(float((kl * counted).sum()), float(counted.sum()))}


def build_rows(
    rows: BatchedDataDict[Any],
    estimator: AdvantageEstimator,
    settings: GRPOSettings,
) -> tuple[BatchedDataDict[Any] | None, dict[str, Any]]:
    """Give each row its advantage, and leave out the rows that do not count.

    Args:
        rows: Columns of `RolloutResult.rows`, branches unfolded, and of
            `add_kl_penalty` if that is used.
        estimator: Makes advantages of rewards.
        settings: Scaling, shaping and filters.

    Returns:
        The columns that training needs, or None when no row is left, and metrics.
    """
    timeline = Timeline.of(rows)
    scored = _conversations(rows, timeline)
    rewards, columns, metrics = _rewards(scored, settings)
    valid, groups = scored["sample_mask"], scored["group_index"]
    advantages = estimator.compute_advantage(rewards, groups, valid, **columns)
    by_name = settings.adv_estimator.name == "gdpo"
    named = columns.get("named_rewards") if by_name else None
    varied = rows_with_variance(rewards, groups, valid, named)
    if settings.num_generations_per_prompt > 1:
        metrics["zero_variance_rate"] = 1.0 - float(varied.float().mean())
    metrics |= _advantage_metrics(advantages, valid, scored["token_mask"])
    keep = valid != 0
    if settings.overlong_filtering:
        kept, dropped = mask_overlong(valid, scored["truncated"])
        keep &= kept != 0
        metrics["overlong_filtered_rate"] = dropped / len(rewards)
    if settings.drop_zero_variance_groups:
        keep &= varied
    train: BatchedDataDict[Any] = BatchedDataDict(
        {name: rows[name] for name in _COLUMNS if name in rows}
    )
    train["advantages"] = (
        timeline.split(advantages)
        if advantages.dim() == 2
        else advantages[timeline.conversation]
    )
    return _select(train, keep[timeline.conversation]), metrics


def mask_disagreement(rows: BatchedDataDict[Any], threshold: float) -> dict[str, Any]:
    """Take rows out of the loss on which the sampler and the trainer disagree.

    Args:
        rows: Columns `generation_logprobs` and `prev_logprobs` among others.
        threshold: See `mask_sequence_logprob_error`.

    Returns:
        Metrics.

    Raises:
        ConfigError: The sampler gave no log-probs.
    """
    if "generation_logprobs" not in rows:
        raise ConfigError(
            "grpo.seq_logprob_error_threshold compares the log-probs of sampler and "
            "trainer, but this generation backend gives none: set it to null, or have "
            "the backend give log-probs"
        )
    num_valid = float((rows["sample_mask"] != 0).sum())
    rows["sample_mask"], dropped = mask_sequence_logprob_error(
        rows["sample_mask"],
        rows["token_mask"],
        rows["generation_logprobs"],
        rows["prev_logprobs"],
        threshold,
    )
    return {"seq_logprob_error_masked_rate": Mean(float(dropped), num_valid)}


def _conversations(
    rows: BatchedDataDict[Any], timeline: Timeline
) -> BatchedDataDict[Any]:
    """Return N rows, each with the tokens of a whole conversation behind each other."""
    found = rows.select_indices(timeline.last_row)
    for name in ("token_mask", "kl_penalty"):
        if name in rows:
            found[name] = timeline.join(rows[name])
    return found


def _rewards(
    rows: BatchedDataDict[Any], settings: GRPOSettings
) -> tuple[Tensor, RewardColumns, dict[str, Any]]:
    """Return the rewards after scaling and shaping, what goes with them, metrics."""
    metrics: dict[str, Any] = {}
    columns: RewardColumns = {"token_mask": rows["token_mask"]}
    rewards = rows["rewards"].to(torch.float32)
    if settings.reward_scaling is not None:
        rewards, clamped = scale_rewards(rewards, settings.reward_scaling)
        metrics["rewards_clamped_rate"] = Mean(float(clamped), float(len(rewards)))
    if settings.reward_shaping is not None:
        columns["std_rewards"] = rewards
        rewards = shape_rewards(
            rewards,
            rows["generation_lengths"],
            rows["truncated"],
            settings.reward_shaping,
        )
        metrics["shaped_reward"] = Mean.of(rewards.tolist())
    if named := named_rewards(rows):
        columns["named_rewards"] = named
        for name, values in named.items():
            known = (rows["sample_mask"] != 0) & values.isfinite()
            metrics[name] = Mean.of(values[known].tolist())
    if "kl_penalty" in rows:
        columns["kl_penalty"] = rows["kl_penalty"]
    return rewards, columns, metrics


def _select(rows: BatchedDataDict[Any], keep: Tensor) -> BatchedDataDict[Any] | None:
    if bool(keep.all()):
        return rows
    indices = keep.nonzero().flatten()
    if not len(indices):
        return None
    rows = rows.select_indices(indices)
    # What was cut off may have been the widest row.
    width = int(rows["input_lengths"].max())
    for name, value in list(rows.items()):
        if isinstance(value, Tensor) and value.dim() == 2:
            rows[name] = value[:, :width]
    return rows


def _advantage_metrics(
    advantages: Tensor, valid: Tensor, token_mask: Tensor
) -> dict[str, Any]:
    counts = valid != 0
    if advantages.dim() == 2:
        counts = (token_mask != 0) & counts.unsqueeze(1)
    counted = advantages[counts]
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
