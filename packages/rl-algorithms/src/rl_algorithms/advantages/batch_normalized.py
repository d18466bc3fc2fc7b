"""Estimators that normalize over the whole batch: REINFORCE++ and GDPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor

from rl_algorithms.advantages.baselines import calculate_baseline_and_std_per_group
from rl_algorithms.advantages.checks import check_reward_columns, check_rewards
from rl_algorithms.advantages.config import AdvantageConfig
from rl_algorithms.advantages.estimators import RewardColumns, finish_advantages
from rl_algorithms.advantages.kl_in_reward import token_returns_after_kl
from rl_algorithms.advantages.whitening import whiten
from rl_algorithms.errors import LossInputError

__all__ = [
    "GDPOAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]


class ReinforcePlusPlusAdvantageEstimator:
    r"""The return of each token, normalized over the tokens of the batch.

    REINFORCE++ (Hu et al., arXiv:2501.03262): with the reward $r$ of the answer and the
    KL penalty $k_j$ of token $j$, the return of token $t$ is

    $$
    G_t = r - \sum_{j \ge t} k_j
    $$

    With `minus_baseline`, the mean reward of the prompt's group is subtracted from $r$
    first (REINFORCE++-baseline).
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
        """See `AdvantageEstimator`; [N, S] with a KL penalty, otherwise [N]."""
        check_rewards(rewards, group_index=group_index, valid_mask=valid_mask)
        check_reward_columns(rewards, columns)
        config = self.config
        valid = torch.ones_like(rewards) if valid_mask is None else valid_mask != 0
        returns = rewards.to(torch.float64)
        if config.minus_baseline:
            baseline, _ = calculate_baseline_and_std_per_group(
                group_index, returns, valid, config.use_leave_one_out_baseline
            )
            returns = returns - baseline
        token_mask = columns.get("token_mask")
        weights = valid.to(torch.float64)
        penalty = columns.get("kl_penalty")
        if penalty is not None:
            if token_mask is None:
                raise LossInputError("a KL penalty per token needs token_mask [N, S]")
            returns = token_returns_after_kl(returns, penalty)
            weights = weights[:, None] * token_mask.to(torch.float64)
        elif token_mask is not None:
            # An answer counts by its tokens, so that the mean over tokens is 0, with
            # and without a KL penalty per token.
            weights = weights * token_mask.to(torch.float64).sum(-1)
        if config.normalize_rewards:
            returns = whiten(returns, weights)
        if penalty is not None:
            # Without whitening, tokens that are no actions would keep the returns that
            # follow them.
            returns = torch.where(weights != 0, returns, 0.0)
        return finish_advantages(returns, rewards, valid_mask, config)


class GDPOAdvantageEstimator:
    r"""Several rewards, each relative to its group; their sum relative to the batch.

    GDPO (arXiv:2601.05242): with the weight $w_k$ of reward $k$, and its mean $b_k$ and
    standard deviation $\sigma_k$ in the group, the advantage before normalization is

    $$
    A = \sum_k w_k \frac{r_k - b_k}{\sigma_k}
    $$

    Normalizing each reward keeps its own scale, which the sum of the rewards would
    lose. A reward that does not apply to a row (NaN) contributes 0.
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
        """See `AdvantageEstimator`; reads `named_rewards`."""
        check_rewards(rewards, group_index=group_index, valid_mask=valid_mask)
        check_reward_columns(rewards, columns)
        config, named = self.config, columns.get("named_rewards") or {}
        valid = torch.ones_like(rewards) if valid_mask is None else valid_mask
        total = torch.zeros_like(rewards, dtype=torch.float64)
        for name, weight in self._weights(named).items():
            total = total + weight * self._relative(named[name], group_index, valid)
        # The scale of the sum grows with the number of rewards, and normalizing over
        # the batch removes that.
        advantages = whiten(total, (valid != 0).to(torch.float64))
        return finish_advantages(advantages, rewards, valid_mask, config)

    def _weights(self, named: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the weight of each reward, 1 by default."""
        # Sorted, so that the float sum does not depend on the order of an environment's
        # keys.
        names = sorted(named)
        if len(names) < 2:
            raise LossInputError(
                "adv_estimator.name=gdpo combines at least two named rewards: the "
                f"environment gave {', '.join(names) or 'none'}; let the reward "
                "function return a mapping of numbers, or use grpo"
            )
        weights = self.config.reward_weights or {}
        if unknown := sorted(set(weights) - set(names)):
            raise LossInputError(
                f"adv_estimator.reward_weights has no reward for {', '.join(unknown)}: "
                f"the environment gave {', '.join(names)}"
            )
        return {name: weights.get(name, 1.0) for name in names}

    def _relative(self, values: Tensor, group_index: Tensor, valid: Tensor) -> Tensor:
        """Return [N], one reward relative to its group; 0 where it does not apply."""
        config = self.config
        # NaN means that the reward does not apply: such a row leaves the group's
        # statistics too.
        applies = (valid != 0) & values.isfinite()
        values = torch.where(applies, values, 0.0).to(torch.float64)
        baseline, std = calculate_baseline_and_std_per_group(
            group_index, values, applies, config.use_leave_one_out_baseline
        )
        advantages = values - baseline
        if config.normalize_rewards:
            advantages = advantages / torch.where(std > 0, std, 1.0)
        return torch.where(applies, advantages, 0.0)
