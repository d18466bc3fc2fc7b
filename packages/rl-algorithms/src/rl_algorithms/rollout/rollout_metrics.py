"""Metrics of a rollout, typed so that those of several rollouts merge exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_algorithms.rollout.result import Outcome
from rl_distributed.metrics.values import Max, Mean, MetricValue, Min
from rl_envs.outcomes import ConversationOutcome

__all__ = ["ending_metrics", "rollout_metrics"]


def rollout_metrics(
    *,
    rewards: Tensor,
    outcome: Tensor,
    truncated: Tensor,
    generation_lengths: Tensor,
    prompt_lengths: Tensor,
    env_tokens: Tensor,
    total_lengths: Tensor,
    num_turns: Tensor,
    cut_answers: Tensor,
    turn_limit_reached: Tensor,
    weight_version: Tensor,
    num_branches: Tensor,
) -> dict[str, MetricValue]:
    """Summarize N rows; rewards of failed rows are left out.

    Args:
        rewards: [N].
        outcome: [N] of `Outcome`.
        truncated: [N] bool, whether a length limit ended the conversation.
        generation_lengths: [N] sampled tokens.
        prompt_lengths: [N] tokens of the first prompt.
        env_tokens: [N] tokens of the environment's messages.
        total_lengths: [N] tokens of the whole conversation.
        num_turns: [N] number of answers.
        cut_answers: [N] number of answers cut off by a length limit.
        turn_limit_reached: [N] bool.
        weight_version: [N]; counts in rows with an answer.
        num_branches: [N] number of times the chat template rewrote the conversation.
    """
    count = float(len(rewards))
    scored = outcome <= Outcome.TRUNCATED
    num_scored = float(scored.sum())
    kept = torch.where(scored, rewards, 0.0).to(torch.float64)
    values = {
        "mean_gen_tokens_per_sample": generation_lengths,
        "mean_prompt_length": prompt_lengths,
        "mean_env_tokens_per_sample": env_tokens,
        "mean_total_tokens_per_sample": total_lengths,
        "avg_turns_per_sample": num_turns,
        "mean_branches_per_sample": num_branches,
        "max_turns_reached_rate": turn_limit_reached,
        "truncation_rate": truncated & scored,
        "natural_termination_rate": outcome == Outcome.OK,
        "environment_error_rate": outcome == Outcome.ENVIRONMENT_ERROR,
        "infrastructure_error_rate": outcome == Outcome.INFRASTRUCTURE_ERROR,
        "stale_rate": outcome == Outcome.STALE,
    }
    # One reduction and one transfer for all columns; float64, because sums of token
    # counts over long runs exceed what float32 holds exactly.
    totals = torch.stack([*values.values()]).sum(1, dtype=torch.float64).tolist()
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(values, totals, strict=True)
    }
    metrics["reward"] = Mean(float(kept.sum()), num_scored)
    metrics["cut_answer_rate"] = Mean(float(cut_answers.sum()), float(num_turns.sum()))
    if num_scored:
        metrics["reward_min"] = Min(float(rewards[scored].min()))
        metrics["reward_max"] = Max(float(rewards[scored].max()))
    metrics["max_gen_tokens_per_sample"] = Max(float(generation_lengths.max()))
    metrics["max_turns_per_sample"] = Max(float(num_turns.max()))
    # A row that failed before its first answer has the number 0, and no weights.
    versions = weight_version[num_turns > 0]
    if len(versions):
        metrics["weight_version_min"] = Min(float(versions.min()))
        metrics["weight_version_max"] = Max(float(versions.max()))
    return metrics


def ending_metrics(ending: Sequence[ConversationOutcome]) -> dict[str, MetricValue]:
    """Return the share of rows with each ending, as `outcome/<name>`.

    Args:
        ending: [N] what ended the conversations.
    """
    # Each of them even without any, so that curves have no gaps.
    return {
        f"outcome/{each.value}": Mean(float(ending.count(each)), float(len(ending)))
        for each in ConversationOutcome
    }
