"""Estimators of advantages from rewards.

| name | advantage of an answer |
|---|---|
| `grpo` | its reward relative to the other answers to the prompt |
| `gdpo` | the same for each of several rewards, then combined |
| `reinforce_plus_plus` | its reward relative to the batch, per token if KL is in it |
| `raw_reward` | its reward |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from rl_algorithms.advantages.baselines import calculate_baseline_and_std_per_group
from rl_algorithms.advantages.checks import check_reward_columns, check_rewards
from rl_algorithms.advantages.config import AdvantageConfig
from rl_algorithms.advantages.kl_in_reward import answer_rewards_after_kl

__all__ = [
    "AdvantageEstimator",
    "GRPOAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "RewardColumns",
    "finish_advantages",
]


class RewardColumns(TypedDict, total=False):
    """Optional columns of the rows; an estimator reads those that it needs."""

    std_rewards: Tensor | None
    """[N] rewards before shaping, whose standard deviation normalizes."""
    named_rewards: Mapping[str, Tensor]
    """[N] each, the parts of the rewards by name; NaN where one does not apply."""
    token_mask: Tensor
    """[N, S], 1 on sampled tokens."""
    kl_penalty: Tensor
    """[N, S] KL penalty of each token on the reward; 0 where masked."""


class AdvantageEstimator(Protocol):
    """Turns the rewards of a batch into advantages."""

    def compute_advantage(
        self,
        rewards: Tensor,
        group_index: Tensor,
        valid_mask: Tensor | None = None,
        **columns: Unpack[RewardColumns],
    ) -> Tensor:
        """Return [N] or [N, S] advantages, 0 where `valid_mask` is 0.

        Args:
            rewards: [N].
            group_index: [N] group of each row: one per row of the data set, even if two
                of these have equal prompts.
            valid_mask: [N], 1 where the row counts; by default all do.
            columns: See `RewardColumns`.

        Raises:
            LossInputError: The columns do not have the same rows, or one that this
                estimator needs is missing.
        """
        ...


class GRPOAdvantageEstimator:
    r"""Rewards relative to their prompt's group (Shao et al., arXiv:2402.03300).

    With the mean $b_i$ and the standard deviation $\sigma_i$ of the other answers, the
    advantage of answer $i$ is

    $$
    A_i = \frac{r_i - b_i}{\sigma_i}
    $$

    If the others of a group agree, the standard deviation of the whole group is used.
    Rows of a group without any are not divided, since their advantages are 0 up to
    rounding. See `advantages.baselines`.
    """

    def __init__(self, config: AdvantageConfig | None = None) -> None:
        self.config = config if config is not None else AdvantageConfig()

    def compute_advantage(
        self,
        rewards: Tensor,
        group_index: Tensor,
        valid_mask: Tensor | None = None,
        **columns: Unpack[RewardColumns],
    ) -> Tensor:
        """See `AdvantageEstimator`."""
        check_rewards(rewards, group_index=group_index, valid_mask=valid_mask)
        check_reward_columns(rewards, columns)
        config, std_rewards = self.config, columns.get("std_rewards")
        values = answer_rewards_after_kl(rewards, columns.get("kl_penalty"))
        baseline, std = calculate_baseline_and_std_per_group(
            group_index,
            values,
            valid_mask,
            config.use_leave_one_out_baseline,
            None if std_rewards is None else std_rewards.to(torch.float64),
        )
        if config.normalize_over == "batch":
            _, std = calculate_baseline_and_std_per_group(
                # A single group: the whole batch.
                torch.zeros_like(group_index),
                (values if std_rewards is None else std_rewards).to(torch.float64),
                valid_mask,
                leave_one_out_baseline=False,
            )
        advantages = values - baseline
        if config.normalize_rewards:
            # No epsilon: agreement is an exact 0 here, and an epsilon would shrink
            # close rewards.
            advantages = advantages / torch.where(std > 0, std, 1.0)
        return finish_advantages(advantages, rewards, valid_mask, config)


class RawRewardAdvantageEstimator:
    """The reward itself, for rewards that already are advantages."""

    def __init__(self, config: AdvantageConfig | None = None) -> None:
        self.config = config if config is not None else AdvantageConfig()

    def compute_advantage(
        self,
        rewards: Tensor,
        group_index: Tensor,
        valid_mask: Tensor | None = None,
        **columns: Unpack[RewardColumns],
    ) -> Tensor:
        """See `AdvantageEstimator`; groups and `std_rewards` are not used."""
        check_rewards(rewards, group_index=group_index, valid_mask=valid_mask)
        check_reward_columns(rewards, columns)
        values = answer_rewards_after_kl(rewards, columns.get("kl_penalty"))
        return finish_advantages(values, rewards, valid_mask, self.config)


def finish_advantages(
    advantages: Tensor,
    rewards: Tensor,
    valid_mask: Tensor | None,
    config: AdvantageConfig,
) -> Tensor:
    """Clip advantages, set invalid rows to 0, and convert to the dtype of the rewards.

    Args:
        advantages: [N] or [N, S].
        rewards: [N].
        valid_mask: [N], 1 where the row counts.
        config: Settings with the bounds.
    """
    low, high = config.advantage_clip_low, config.advantage_clip_high
    if low is not None or high is not None:
        advantages = advantages.clamp(low, high)
    if valid_mask is not None:
        # Appends axes for [N, S] advantages, as broadcasting would align rows with
        # tokens.
        valid = (valid_mask != 0).reshape(-1, *[1] * (advantages.dim() - 1))
        # `where` and not a product: the reward of an invalid row may be NaN.
        advantages = torch.where(valid, advantages, 0.0)
    return advantages.to(
        # Rewards may be integers, whose dtype would truncate an advantage of 0.5 to 0.
        rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    )
