"""Training rows of PPO from scored answers: pure functions.

Shapes: N conversations, T tokens of the longest one; R rows, S tokens wide. Without
branches R is N and S is T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_algorithms.advantages.gae import (
    final_values,
    gae,
    state_values,
    token_rewards,
)
from rl_algorithms.advantages.overlong import usable_answers
from rl_algorithms.advantages.rewards import final_rewards
from rl_algorithms.advantages.summary import advantage_metrics
from rl_algorithms.advantages.whitening import whiten
from rl_algorithms.ppo.config import PPOSettings
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.rollout.timeline import Timeline
from rl_algorithms.seeds import mix, permutation
from rl_algorithms.trainers.sampling.kept_answers import ROW_NUMBER
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import TrainingRows

__all__ = [
    "add_advantages",
    "add_nll_weights",
    "rows_of_epoch",
    "trainable_rows",
]

_COLUMNS = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "generation_logprobs",
    "final_rewards",
    "truncated",
    "rewards",
    "branches",
    ROW_NUMBER,
)
_MIN_SPREAD = 1e-8
"""Smallest variance of returns for which an explained share is meaningful."""


def trainable_rows(
    rows: TrajectoryRows, settings: PPOSettings
) -> tuple[TrainingRows | None, dict[str, Any]]:
    """Keep the rows and columns for training.

    Args:
        rows: Columns of `RolloutResult.rows`.
        settings: Scaling, shaping and filters.

    Returns:
        The rows with column `final_rewards`, or None if none is left; and metrics.
    """
    rewards = final_rewards(rows, settings.reward_scaling, settings.reward_shaping)
    keep, filtered = usable_answers(
        rows["sample_mask"],
        rows["truncated"],
        overlong_filtering=settings.overlong_filtering,
    )
    metrics: dict[str, Any] = {**rewards.metrics, **filtered}
    found: TrainingRows = BatchedDataDict(
        {name: rows[name] for name in _COLUMNS if name in rows}
    )
    # Beside `rewards`, which stay unscaled: successes are judged by the environment's
    # scale.
    found["final_rewards"] = rewards.values
    indices = keep.nonzero().flatten()
    if not len(indices):
        return None, metrics
    if len(indices) < len(keep):
        found = found.select_indices(indices)
    return found, metrics


def add_advantages(rows: TrainingRows, settings: PPOSettings) -> dict[str, Any]:
    """Add the columns `advantages` and `returns` [R, S].

    The parts of a branched conversation form one episode: the reward comes with its
    last token, and the state after the last token of a part is the one in which the
    next part begins.

    Args:
        rows: Columns `final_rewards`, `values`, `token_mask`, `sample_mask`,
            `truncated`, and `kl_penalty` with a KL penalty on the reward.
        settings: Gamma, lambda, bootstrapping of truncated answers, and normalization
            of advantages.

    Returns:
        Metrics.
    """
    mask = rows["token_mask"] * rows["sample_mask"][:, None]
    # The first token has no state in which it was chosen; the product above is a new
    # tensor.
    mask[:, 0] = 0
    timeline = Timeline.of(rows)
    last, actions = timeline.last_row, timeline.join(rows["token_mask"])
    kl_penalty = timeline.join(rows["kl_penalty"]) if "kl_penalty" in rows else None
    rewards = token_rewards(rows["final_rewards"][last], actions, kl_penalty)
    states = state_values(rows["values"])
    values = timeline.join(states)
    after = None
    if settings.bootstrap_truncated:
        found = timeline.join(rows["values"])
        after = final_values(found, actions, rows["truncated"][last])

    def estimate(lam: float) -> tuple[Tensor, Tensor]:
        found = gae(
            rewards,
            values,
            actions,
            gamma=settings.gae_gamma,
            lam=lam,
            last_values=after,
        )
        advantages, returns = (timeline.split(column) for column in found)
        return advantages, returns

    lam, lam_value = settings.gae_lambda, settings.gae_lambda_value
    advantages, returns = estimate(lam)
    if lam_value is not None and lam_value != lam:
        _, returns = estimate(lam_value)
    # Before normalization, after which every step looks alike.
    metrics = _metrics(advantages, returns, states, mask != 0)
    if settings.normalize_advantages:
        advantages = whiten(advantages, mask)
    rows["advantages"] = advantages.to(torch.float32)
    rows["returns"] = returns.to(torch.float32)
    return metrics


def rows_of_epoch(
    rows: TrainingRows, *, seed: int, step: int, epoch: int
) -> TrainingRows:
    """Return the rows in an order determined by seed, step and pass."""
    # Not a generator with a state: a resumed run must reach the same order.
    order = permutation(rows.size, seed=int(mix(seed, step)), epoch=epoch)
    return rows.select_indices(order.tolist())


def add_nll_weights(
    rows: TrainingRows, threshold: float, global_batch_size: int
) -> None:
    """Add the column `nll_weights` [N], see `ClippedPGLossFn`.

    Args:
        rows: Columns `rewards`, `token_mask` and `sample_mask`, in training order.
        threshold: Reward above which a row is successful.
        global_batch_size: Number of rows per optimizer step, within which weights are
            normalized.
    """
    counted = rows["token_mask"][:, 1:] != 0
    tokens = (counted.sum(1) * rows["sample_mask"]).view(-1, global_batch_size)
    succeeded = (rows["rewards"] > threshold).view(-1, global_batch_size)
    good = (tokens * succeeded).sum(1, keepdim=True)
    share = torch.where(good > 0, tokens.sum(1, keepdim=True) / good, 0.0)
    rows["nll_weights"] = (share * succeeded).flatten()


def _metrics(
    advantages: Tensor, returns: Tensor, values: Tensor, counts: Tensor
) -> dict[str, Any]:
    if not bool(counts.any()):
        return {}
    a, r, v = advantages[counts], returns[counts], values[counts].double()
    spread = float(r.var(correction=0))
    metrics = {**advantage_metrics(a), "returns/mean": float(r.mean())}
    if spread > _MIN_SPREAD:
        unexplained = float((r - v).var(correction=0))
        metrics["critic/explained_variance"] = 1.0 - unexplained / spread
    return metrics
