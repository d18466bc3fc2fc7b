"""Answers that are too long: cut off by the length limit, or close to it.

`overlong_filtering` excludes truncated answers from the loss; `reward_shaping` lowers
the reward of long answers (DAPO, arXiv:2503.14476, section 3.4). For rows of a data set
that do not fit, see `rl_algorithms.data.length_limit`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.advantages.checks import check_rewards
from rl_algorithms.advantages.config import RewardShapingConfig
from rl_algorithms.errors import LossInputError

__all__ = ["mask_overlong", "shape_rewards", "usable_answers"]


def mask_overlong(sample_mask: Tensor, truncated: Tensor) -> tuple[Tensor, int]:
    """Exclude truncated answers from the loss (DAPO's overlong filtering).

    Args:
        sample_mask: [N], 1 where the row counts.
        truncated: [N] whether the answer was cut off.

    Returns:
        The new sample mask, and the number of rows that it lost.

    Raises:
        LossInputError: The two do not have the same rows.
    """
    if truncated.shape != sample_mask.shape:
        raise LossInputError(
            "truncated must have the shape of sample_mask, "
            f"{list(sample_mask.shape)}: got {list(truncated.shape)}"
        )
    # Rows that already did not count are not counted as dropped again.
    dropped = truncated.bool() & (sample_mask != 0)
    return sample_mask.masked_fill(dropped, 0), int(dropped.sum())


def usable_answers(
    sample_mask: Tensor, truncated: Tensor, *, overlong_filtering: bool
) -> tuple[Tensor, dict[str, float]]:
    """Return [N] bool, whether an answer may be trained on, and metrics.

    Args:
        sample_mask: [N], 1 where the row counts.
        truncated: [N] whether the answer was cut off.
        overlong_filtering: Whether to exclude truncated answers.
    """
    if not overlong_filtering:
        return sample_mask != 0, {}
    kept, dropped = mask_overlong(sample_mask, truncated)
    return kept != 0, {"overlong_filtered_rate": dropped / len(sample_mask)}


def shape_rewards(
    rewards: Tensor,
    generation_lengths: Tensor,
    truncated: Tensor,
    config: RewardShapingConfig,
) -> Tensor:
    r"""Apply the length penalties.

    With length $n$, limit $L$, buffer $b$ and full penalty $p$, the reward becomes
    (DAPO, arXiv:2503.14476, section 3.4)

    $$
    r - p \operatorname{clip}\left( \frac{n - (L - b)}{b}, 0, 1 \right)
    $$

    Args:
        rewards: [N].
        generation_lengths: [N] sampled tokens of all turns.
        truncated: [N] whether the answer was cut off.
        config: Settings of the penalty.

    Raises:
        LossInputError: The columns do not have the same rows.
    """
    check_rewards(rewards, generation_lengths=generation_lengths, truncated=truncated)
    # The two penalties exclude each other in the configuration, so there is no order of
    # them.
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
