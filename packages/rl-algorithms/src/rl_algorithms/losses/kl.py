"""Estimators of the KL divergence from samples."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.config import KLType

__all__ = ["calculate_kl"]


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: KLType = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Estimate KL(policy || reference) per token.

    With tokens sampled from the policy $\pi$ and
    $r = \log \pi_{\text{ref}} - \log \pi$ (J. Schulman,
    [Approximating KL divergence](http://joschu.net/blog/kl-approx.html)):

    | `kl_type` | estimate | bias | variance |
    |---|---|---|---|
    | `k1` | $-r$ | none | high |
    | `k2` | $\frac{r^2}{2}$ | some | low |
    | `k3` | $e^r - 1 - r$, never negative | none | low |

    Args:
        logprobs: Log-probs of the policy.
        logprobs_reference: Log-probs of the reference for the same tokens.
        kl_type: `k1`, `k2` or `k3`.
        input_clamp_value: Bound on the absolute difference of log-probs.
        output_clamp_value: Bound on the absolute estimate, including its weight.
        weights: Importance weights of the estimates, such as policy over sampler.

    Returns:
        Estimates of the shape of `logprobs`.

    Raises:
        LossInputError: Shapes differ, or the kind is unknown.
    """
    for name, value in (
        ("logprobs_reference", logprobs_reference),
        ("weights", weights),
    ):
        if value is not None and value.shape != logprobs.shape:
            raise LossInputError(
                f"calculate_kl: {name} must have the shape of logprobs, "
                f"{list(logprobs.shape)}: got {list(value.shape)}"
            )
    log_ratio = logprobs_reference - logprobs
    if input_clamp_value is not None:
        # Clamped before expm1, which would overflow to inf and turn the gradient into
        # NaN.
        log_ratio = log_ratio.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        kl = -log_ratio
    elif kl_type == "k2":
        kl = 0.5 * log_ratio.square()
    elif kl_type == "k3":
        # expm1 keeps the digits of a small difference, which exp(r) - 1 would lose.
        kl = torch.expm1(log_ratio) - log_ratio
    else:
        raise LossInputError(
            f"kl_type must be one of {', '.join(get_args(KLType))}: got {kl_type!r}"
        )
    if weights is not None:
        # Weighted before the bound: a rare token may have the weight e^20, and would
        # dominate the loss.
        kl = kl * weights
    if output_clamp_value is not None:
        kl = kl.clamp(-output_clamp_value, output_clamp_value)
    return kl
