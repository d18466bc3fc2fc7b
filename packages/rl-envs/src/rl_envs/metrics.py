"""Metrics of finished batches, computed from their columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_distributed.batch.arrays import is_array, to_numpy

if TYPE_CHECKING:
    import torch

__all__ = ["calculate_pass_rate_per_prompt", "reward_metrics"]


def calculate_pass_rate_per_prompt(
    prompts: Iterable[Hashable] | torch.Tensor, is_correct: torch.Tensor
) -> float:
    """Return the share of distinct prompts with at least one correct response.

    Args:
        prompts: [N] texts or group indices; equal entries are the same prompt. In a
            tensor or numpy array of tokens, [N, S], each distinct row is a prompt.
        is_correct: [N] bool: a tensor, a numpy array or a list.

    Raises:
        ValueError: The lengths differ.
    """
    keys: list[Any] = []
    if is_array(prompts):
        rows = to_numpy(prompts).tolist()
        # Lists of tokens cannot be keys.
        keys = [tuple(row) if isinstance(row, list) else row for row in rows]
    else:
        keys = list(prompts)
    if len(keys) != len(is_correct):
        raise ValueError(
            f"prompts must hold one prompt per response: got {len(keys)} for "
            f"{len(is_correct)} entries of is_correct"
        )
    solved: dict[Hashable, bool] = {}
    for key, correct in zip(keys, to_numpy(is_correct).tolist(), strict=True):
        solved[key] = solved.get(key, False) or bool(correct)
    return sum(solved.values()) / len(solved) if solved else 0.0


def reward_metrics(batch: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean, minimum, maximum and unscored share of `batch["rewards"]`.

    Rewards may be a tensor, a numpy array or a list. Rows with a NaN reward were not
    scored; they count only in the unscored share.
    """
    rewards = batch.get("rewards", batch.get("total_reward"))
    if rewards is None or len(rewards) == 0:
        return {}
    # float64: the mean of many float32 rewards would lose digits.
    values = to_numpy(rewards).astype(np.float64)
    scored = values[~np.isnan(values)]
    metrics = {"unscored_fraction": 1.0 - len(scored) / len(values)}
    if len(scored):
        metrics["reward_mean"] = scored.mean().item()
        metrics["reward_min"] = scored.min().item()
        metrics["reward_max"] = scored.max().item()
    return metrics
