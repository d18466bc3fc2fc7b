"""Importance weights between the trainer's and the sampler's log-probs.

They differ by numerics (kernels, precision) and, with asynchronous rollouts, by weight
versions. `w = p_trainer / p_sampler` turns the loss into an expectation over the
trainer's own distribution; truncation bounds its variance.
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
    """Return `exp(log_ratio)` per token, or `exp` of its sum per sequence.

    Args:
        log_ratio: [B, T] trainer minus sampler, 0 where the mask is 0.
        sequence_level: Whether to use one weight per sequence.
        mask: [B, T].

    Returns:
        [B, T]; non-finite weights become 0, which drops their tokens.
    """
    if sequence_level:
        # Only whether a token counts: a mask that also weights rows must not become an
        # exponent of their ratios.
        total = (log_ratio * (mask != 0)).sum(-1, keepdim=True)
        log_ratio = total.expand_as(log_ratio)
    # Unlike the ratio of the loss, these weights are not clamped, so exp may overflow.
    return torch.nan_to_num(log_ratio.exp(), nan=0.0, posinf=0.0, neginf=0.0)


def truncate_weights(
    weights: Tensor, log_ratio: Tensor, mask: Tensor, config: ClippedPGLossConfig
) -> tuple[Tensor, Tensor]:
    """Bound the weights by `config.truncated_importance_sampling_type`.

    Args:
        weights: [B, T] of `importance_weights`.
        log_ratio: [B, T] logarithms from which they were computed.
        mask: [B, T].
        config: Settings with kind and bounds.

    Returns:
        The bounded weights, and [B, T] bool, whether a weight was out of bounds.
    """
    kind = config.truncated_importance_sampling_type
    high = config.truncated_importance_sampling_ratio
    if kind is None or high is None:
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    judged = weights
    if kind == "seq-mask-tis":
        # The geometric mean, so that the same bounds suit answers of any length.
        mean_log = masked_mean(log_ratio, mask, dim=-1).unsqueeze(-1)
        judged = mean_log.exp().expand_as(weights)
    outside = (judged > high) | (judged < low)
    if kind == "tis":
        return weights.clamp(low, high), outside
    # icepop and seq-mask-tis drop what is out of bounds, where tis cuts it to the
    # bound.
    return weights.masked_fill(outside, 0.0), outside
