"""The KL divergence from the reference policy, taken from the rewards.

With `loss_fn.use_kl_in_reward` each sampled token costs the answer some of its reward.
`add_kl_penalty` computes what; how it is subtracted depends on what is rewarded:

| rewarded | function | used by |
|---|---|---|
| an answer, once | `answer_rewards_after_kl` | `grpo`, `raw_reward` |
| a token, with all that follows it | `token_returns_after_kl` | `reinforce_plus_plus` |
| a token, with its own reward | `token_rewards_after_kl` | GAE |

Everything is computed in float64. Shapes: R rows, S tokens wide; N conversations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.kl import calculate_kl
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.metrics.values import Mean

__all__ = [
    "add_kl_penalty",
    "answer_rewards_after_kl",
    "token_returns_after_kl",
    "token_rewards_after_kl",
]


def add_kl_penalty(
    rows: BatchedDataDict[Any], config: ClippedPGLossConfig
) -> dict[str, Mean]:
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


def answer_rewards_after_kl(rewards: Tensor, kl_penalty: Tensor | None) -> Tensor:
    """Return [N]: rewards minus the penalties of the whole answer.

    Args:
        rewards: [N].
        kl_penalty: [N, S]; default nothing.
    """
    values = rewards.to(torch.float64)
    return values if kl_penalty is None else values - kl_penalty.double().sum(-1)


def token_returns_after_kl(returns: Tensor, kl_penalty: Tensor) -> Tensor:
    """Return [N, S]: an answer's return minus the penalties from each token on.

    Args:
        returns: [N].
        kl_penalty: [N, S].
    """
    # What is still to come at each token, itself included.
    to_come = kl_penalty.to(torch.float64).flip(-1).cumsum(-1).flip(-1)
    return returns.to(torch.float64)[:, None] - to_come


def token_rewards_after_kl(
    rewards: Tensor, kl_penalty: Tensor | None, actions: Tensor
) -> Tensor:
    """Return [N, S]: the reward of each token minus its own penalty.

    Args:
        rewards: [N, S].
        kl_penalty: [N, S]; default nothing.
        actions: [N, S] which tokens are actions; the others pay nothing.
    """
    values = rewards.to(torch.float64)
    if kl_penalty is None:
        return values
    return values - torch.where(actions, kl_penalty.double(), 0.0)
