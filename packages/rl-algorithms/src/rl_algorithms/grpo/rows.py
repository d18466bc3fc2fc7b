"""Training rows of GRPO from scored answers: pure functions.

Shapes: N conversations, T tokens of the longest one; R rows, S tokens wide. Without
branches R is N and S is T.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_algorithms.advantages import AdvantageEstimator, RewardColumns
from rl_algorithms.advantages.overlong import usable_answers
from rl_algorithms.advantages.rewards import final_rewards
from rl_algorithms.advantages.summary import advantage_metrics
from rl_algorithms.filters import (
    mask_sequence_logprob_error,
    named_rewards,
    rows_with_variance,
)
from rl_algorithms.grpo.config import GRPOSettings
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.rollout.timeline import Timeline
from rl_algorithms.trainers.sampling.kept_answers import ROW_NUMBER
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
)
from rl_distributed.errors import ConfigError
from rl_distributed.metrics.values import Mean
from rl_models.types import TrainingRows

__all__ = ["build_rows", "mask_disagreement"]

_COLUMNS = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "generation_logprobs",
    "prev_logprobs",
    ROW_NUMBER,
)


def build_rows(
    rows: TrajectoryRows,
    estimator: AdvantageEstimator,
    settings: GRPOSettings,
) -> tuple[TrainingRows | None, dict[str, Any]]:
    """Add the advantages, and drop the rows that do not count.

    Args:
        rows: Columns of `RolloutResult.rows` with branches unfolded, and of
            `add_kl_penalty` if it is used.
        estimator: Estimator of advantages.
        settings: Scaling, shaping and filters.

    Returns:
        The columns for training, or None if no row is left; and metrics.
    """
    timeline = Timeline.of(rows)
    scored = _conversations(rows, timeline)
    rewards, columns, metrics = _rewards(scored, settings)
    # Advantages are of conversations, whose parts share one reward, and go back to the
    # rows below.
    valid, groups = scored["sample_mask"], scored["group_index"]
    advantages = estimator.compute_advantage(rewards, groups, valid, **columns)
    by_name = settings.adv_estimator.name == "gdpo"
    named = columns.get("named_rewards") if by_name else None
    varied = rows_with_variance(rewards, groups, valid, named)
    # A single answer has no variance by definition, and the rate would always read 1.
    if settings.num_generations_per_prompt > 1:
        metrics["zero_variance_rate"] = 1.0 - float(varied.float().mean())
    counted = valid != 0
    if advantages.dim() == 2:
        counted = (scored["token_mask"] != 0) & counted.unsqueeze(1)
    metrics |= advantage_metrics(advantages[counted])
    keep, filtered = usable_answers(
        valid, scored["truncated"], overlong_filtering=settings.overlong_filtering
    )
    metrics |= filtered
    if settings.drop_zero_variance_groups:
        # Only after the estimator: groups without variance still belong to the batch's
        # statistics.
        keep &= varied
    train: TrainingRows = BatchedDataDict(
        {name: rows[name] for name in _COLUMNS if name in rows}
    )
    train["advantages"] = (
        timeline.split(advantages)
        if advantages.dim() == 2
        else advantages[timeline.conversation]
    )
    return _select(train, keep[timeline.conversation]), metrics


def mask_disagreement(rows: TrainingRows, threshold: float) -> dict[str, Any]:
    """Exclude rows from the loss on which sampler and trainer disagree.

    Args:
        rows: Columns `generation_logprobs` and `prev_logprobs` among others.
        threshold: See `mask_sequence_logprob_error`.

    Returns:
        Metrics.

    Raises:
        ConfigError: The sampler returned no log-probs.
    """
    if "generation_logprobs" not in rows:
        raise ConfigError(
            "grpo.seq_logprob_error_threshold compares the log-probs of sampler and "
            "trainer, but this generation backend returns none: set it to null, or "
            "have the backend return log-probs"
        )
    # Counted first, as masking changes the column.
    num_valid = float((rows["sample_mask"] != 0).sum())
    rows["sample_mask"], dropped = mask_sequence_logprob_error(
        rows["sample_mask"],
        rows["token_mask"],
        rows["generation_logprobs"],
        rows["prev_logprobs"],
        threshold,
    )
    return {"seq_logprob_error_masked_rate": Mean(float(dropped), num_valid)}


def _conversations(rows: TrajectoryRows, timeline: Timeline) -> TrajectoryRows:
    """Return N rows, each with the concatenated tokens of a whole conversation."""
    # The reward of a conversation is that of its last part.
    found = rows.select_indices(timeline.last_row)
    for name in ("token_mask", "kl_penalty"):
        if name in rows:
            found[name] = timeline.join(rows[name])
    return found


def _rewards(
    rows: TrajectoryRows, settings: GRPOSettings
) -> tuple[Tensor, RewardColumns, dict[str, Any]]:
    """Return the scaled and shaped rewards, the columns beside them, and metrics."""
    columns: RewardColumns = {"token_mask": rows["token_mask"]}
    rewards = final_rewards(rows, settings.reward_scaling, settings.reward_shaping)
    metrics: dict[str, Any] = {**rewards.metrics}
    if settings.reward_shaping is not None:
        # A length penalty must not change the scale of a group: it would make correct
        # answers of uneven lengths look noisy.
        columns["std_rewards"] = rewards.unshaped
    if named := named_rewards(rows):
        columns["named_rewards"] = named
        for name, values in named.items():
            # NaN: the reward does not apply to this row, which must not spoil the mean.
            known = (rows["sample_mask"] != 0) & values.isfinite()
            metrics[name] = Mean.of(values[known].tolist())
    if "kl_penalty" in rows:
        columns["kl_penalty"] = rows["kl_penalty"]
    return rewards.values, columns, metrics


def _select(rows: TrainingRows, keep: Tensor) -> TrainingRows | None:
    if bool(keep.all()):
        return rows
    indices = keep.nonzero().flatten()
    if not len(indices):
        return None
    rows = rows.select_indices(indices)
    # The widest row may be gone: narrow the columns to save padding.
    width = int(rows["input_lengths"].max())
    for name, value in list(rows.items()):
        if isinstance(value, Tensor) and value.dim() == 2:
            rows[name] = value[:, :width]
    return rows
