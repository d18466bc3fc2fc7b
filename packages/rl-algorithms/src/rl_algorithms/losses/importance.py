"""Importance weights between the trainer's and the sampler's log-probs.

The two differ by numerics (kernels, precision) and, with asynchronous rollouts, by
weights. `w = p_trainer / p_sampler` makes the loss an expectation over the trainer's
own distribution; truncation bounds its variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.reductions import masked_mean

__all__ = ["importance_weights", "truncate_weights"]


def importance_weights(
    log_ratio: Tensor, *, sequence_level: bool, mask: Tensor
) -> Tensor:
    """Return `exp(log_ratio)` per token, or of its sum per sequence, broadcast.

    Args:
        log_ratio: [B, T] trainer minus sampler, 0 where the mask is 0.
        sequence_level: One weight per sequence.
        mask: [B, T].

    Returns:
        [B, T]; weights that are not finite become 0, so that they drop the token.
    """
    if sequence_level:
        # A row's weight in the loss is no power of its tokens' ratios.
        total = (log_ratio * (mask != 0)).sum(-1, keepdim=True)
        log_ratio = total.expand_as(log_ratio)
    return torch.nan_to_num(log_ratio.exp(), nan=0.0, posinf=0.0, neginf=0.0)


def truncate_weights(
    weights: Tensor, log_ratio: Tensor, mask: Tensor, config: ClippedPGLossConfig
) -> tuple[Tensor, Tensor]:
    """Bound the weights as `config.truncated_importance_sampling_type` says.

    Args:
        weights: [B, T] of `importance_weights`.
        log_ratio: [B, T] that they were made of.
        mask: [B, T].
        config: Kind and bounds.

    Returns:
        The bounded weights, and [B, T] booleans: which ones were out of bounds.
    """
    kind = config.truncated_importance_sampling_type
    high = config.truncated_importance_sampling_ratio
    if kind is None or high is None:
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    judged = weights
    if kind == "seq-mask-tis":
        mean_log = masked_mean(log_ratio, mask, dim=-1).unsqueeze(-1)
        judged = mean_log.exp().expand_as(weights)
    outside = (judged > high) | (judged < low)
    if kind == "tis":
        return weights.clamp(low, high), outside
    return weights.masked_fill(outside, 0.0), outside
