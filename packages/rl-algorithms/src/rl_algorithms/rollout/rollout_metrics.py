"""Metrics of a rollout, typed so that several rollouts merge exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.rollout.result import Outcome
from rl_distributed.metrics.values import Max, Mean, MetricValue, Min

__all__ = ["rollout_metrics"]


def rollout_metrics(
    *,
    rewards: Tensor,
    outcome: Tensor,
    generation_lengths: Tensor,
    prompt_lengths: Tensor,
    total_lengths: Tensor,
    num_turns: Tensor,
    turn_limit_reached: Tensor,
    weight_version: Tensor,
) -> dict[str, MetricValue]:
    """Summarise N rows; rewards of rows that failed are left out.

    Args:
        rewards: [N].
        outcome: [N] of `Outcome`.
        generation_lengths: [N] sampled tokens.
        prompt_lengths: [N] tokens of the first prompt.
        total_lengths: [N] tokens of the whole conversation.
        num_turns: [N] answers.
        turn_limit_reached: [N] bool.
        weight_version: [N].
    """
    count = float(len(rewards))
    scored = outcome <= Outcome.TRUNCATED
    num_scored = float(scored.sum())
    kept = torch.where(scored, rewards, 0.0).to(torch.float64)
    columns = torch.stack(
        [
            generation_lengths,
            prompt_lengths,
            total_lengths - prompt_lengths - generation_lengths,
            total_lengths,
            num_turns,
            turn_limit_reached,
            outcome == Outcome.TRUNCATED,
            (outcome == Outcome.OK) & ~turn_limit_reached,
            outcome == Outcome.ENVIRONMENT_ERROR,
            outcome == Outcome.INFRASTRUCTURE_ERROR,
        ]
    )
    totals = columns.sum(1, dtype=torch.float64).tolist()
    names = (
        "mean_gen_tokens_per_sample",
        "mean_prompt_length",
        "mean_env_tokens_per_sample",
        "mean_total_tokens_per_sample",
        "avg_turns_per_sample",
        "max_turns_reached_rate",
        "truncation_rate",
        "natural_termination_rate",
        "environment_error_rate",
        "infrastructure_error_rate",
    )
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(names, totals, strict=True)
    }
    metrics["reward"] = Mean(float(kept.sum()), num_scored)
    if num_scored:
        metrics["reward_min"] = Min(float(rewards[scored].min()))
        metrics["reward_max"] = Max(float(rewards[scored].max()))
    metrics["max_gen_tokens_per_sample"] = Max(float(generation_lengths.max()))
    metrics["max_turns_per_sample"] = Max(float(num_turns.max()))
    metrics["weight_version_min"] = Min(float(weight_version.min()))
    metrics["weight_version_max"] = Max(float(weight_version.max()))
    return metrics
