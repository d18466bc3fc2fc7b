"""The KL divergence from the reference policy as a penalty on the rewards.

With `loss_fn.use_kl_in_reward` each sampled token costs some of the answer's reward.
`add_kl_penalty` computes the penalties. Their subtraction depends on the unit of
reward:

| unit | function | used by |
|---|---|---|
| an answer, once | `answer_rewards_after_kl` | `grpo`, `raw_reward` |
| a token and all after it | `token_returns_after_kl` | `reinforce_plus_plus` |
| a token, with its own reward | `token_rewards_after_kl` | GAE |

Everything is computed in float64. Shapes: R rows, S tokens wide; N conversations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.kl import calculate_kl
from rl_distributed.metrics.values import Mean
from rl_models.types import TrainingRows

__all__ = [
    "add_kl_penalty",
    "answer_rewards_after_kl",
    "token_returns_after_kl",
    "token_rewards_after_kl",
]


def add_kl_penalty(rows: TrainingRows, config: ClippedPGLossConfig) -> dict[str, Mean]:
    """Add the column `kl_penalty` [R, S], the penalty of each token on the reward.

    Args:
        rows: Columns `prev_logprobs`, `reference_policy_logprobs` and `token_mask`.
        config: Settings with estimator, bounds and weight.

    Returns:
        Metrics.
    """
    trained = rows["token_mask"] != 0
    kl = calculate_kl(
        # Log-probs of other tokens may be anything, and must not reach the sums.
        torch.where(trained, rows["prev_logprobs"], 0.0),
        torch.where(trained, rows["reference_policy_logprobs"], 0.0),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
    )
    rows["kl_penalty"] = config.reference_policy_kl_penalty * kl
    # The metric leaves invalid rows out; the column keeps them, as estimators have
    # their own mask.
    counted = trained * rows["sample_mask"].unsqueeze(1)
    return {"kl_penalty": Mean(float((kl * counted).sum()), float(counted.sum()))}


def answer_rewards_after_kl(rewards: Tensor, kl_penalty: Tensor | None) -> Tensor:
    """Return [N], the rewards minus the penalties of the whole answer.

    Args:
        rewards: [N].
        kl_penalty: [N, S]; None for no penalty.
    """
    values = rewards.to(torch.float64)
    return values if kl_penalty is None else values - kl_penalty.double().sum(-1)


def token_returns_after_kl(returns: Tensor, kl_penalty: Tensor) -> Tensor:
    """Return [N, S], an answer's return minus the penalties from each token on.

    Args:
        returns: [N].
        kl_penalty: [N, S].
    """
    # Reversed cumulative sum: the penalties still to come, including the token's own.
    to_come = kl_penalty.to(torch.float64).flip(-1).cumsum(-1).flip(-1)
    return returns.to(torch.float64)[:, None] - to_come


def token_rewards_after_kl(
    rewards: Tensor, kl_penalty: Tensor | None, actions: Tensor
) -> Tensor:
    """Return [N, S], the reward of each token minus its own penalty.

    Args:
        rewards: [N, S].
        kl_penalty: [N, S]; None for no penalty.
        actions: [N, S] bool; only actions are penalized.
    """
    values = rewards.to(torch.float64)
    if kl_penalty is None:
        return values
    return values - torch.where(actions, kl_penalty.double(), 0.0)
