"""Metrics of a policy-gradient loss, over trained tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.losses.mismatch import log_ratios_by_position
from rl_algorithms.losses.policy_terms import (
    MAX_LOG_RATIO,
    PolicyTerms,
    bounded_exp,
)
from rl_distributed.metrics.values import Max, Mean, MetricValue, Min, Sum

__all__ = ["policy_metrics"]


def policy_metrics(loss: Tensor, terms: PolicyTerms) -> dict[str, MetricValue]:
    """Return the metrics of a micro-batch, over trained tokens only."""
    tokens = terms.tokens
    # Selected, not multiplied by the mask: other tokens' log-probs may be inf or NaN.
    trained = (~tokens.masked_out).flatten().nonzero().squeeze(-1)

    def take(values: Tensor) -> Tensor:
        return values.detach().flatten().index_select(0, trained)

    weights, logprobs = take(tokens.mask), take(tokens.logprobs)
    prev = take(terms.prev)
    sampler = prev if terms.generation is None else take(terms.generation)
    moved = logprobs - prev
    ratio, clipped = take(terms.ratio), take(terms.clipped_ratio)
    means = {
        "probs_ratio": ratio,
        "probs_ratio_clamped": clipped,
        "clip_fraction": (ratio != clipped).to(ratio.dtype),
        "approx_entropy": -logprobs * bounded_exp(logprobs - sampler),
        "approx_kl": torch.expm1(moved.clamp(max=MAX_LOG_RATIO)) - moved,
    }
    if terms.kl is not None:
        means["kl_penalty"] = take(terms.kl)
    if terms.entropy is not None:
        means["entropy_bonus"] = take(terms.entropy)
    if terms.nll is not None:
        means["positive_nll"] = take(terms.nll)
    if terms.generation is not None:
        means |= _mismatch(prev, sampler)
    if terms.weights is not None and terms.outside is not None:
        means["sampling_importance_ratio"] = take(terms.weights)
        means["is_oob_ratio"] = take(terms.outside).to(ratio.dtype)
    # Sums and counts instead of means, so that micro-batches of unequal size can be
    # merged.
    totals = torch.stack(list(means.values())) @ weights
    counts = torch.stack((loss.detach(), weights.sum(), tokens.sample_mask.sum()))
    extrema = [*ratio.aminmax(), *clipped.aminmax()] if len(trained) else []
    # One transfer to the host for all numbers.
    numbers = torch.cat((totals, counts, *(e.reshape(1) for e in extrema))).tolist()
    value, count, num_rows = numbers[len(means) : len(means) + 3]
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(means, numbers, strict=False)
    }
    if terms.generation is not None:
        log_ratio = prev - sampler
        # `trained` indexes the flattened rows; + 1, because column 0 predicts token 1.
        positions = trained % terms.prev.shape[1] + 1
        metrics |= log_ratios_by_position(log_ratio, positions)
    metrics["loss"] = Sum(value)
    metrics["num_valid_samples"] = Sum(num_rows)
    if extrema:  # a micro-batch without trained tokens has no extrema
        low, high, clipped_low, clipped_high = numbers[-4:]
        metrics["probs_ratio_min"] = Min(low)
        metrics["probs_ratio_max"] = Max(high)
        metrics["probs_ratio_clamped_min"] = Min(clipped_low)
        metrics["probs_ratio_clamped_max"] = Max(clipped_high)
    return metrics


def _mismatch(prev: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Return measures of the sampler's distance from the trainer, per trained token.

    The tokens are the sampler's. With u = p_trainer / p_sampler the means of these
    terms are unbiased estimates of the divergences, and no term is negative:

    | metric | term | divergence |
    |---|---|---|
    | `gen_kl_error` | u - 1 - ln u | KL(sampler, trainer) |
    | `policy_kl_error` | u ln u - (u - 1) | KL(trainer, sampler) |
    | `js_divergence_error` | (u ln(2u / (1+u)) + ln(2 / (1+u))) / 2 | Jensen-Shannon |

    `token_mult_prob_error` is `exp|ln u|`, 1 when they agree.
    """
    log_ratio = (prev - generation).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Near agreement each term is a small difference of two numbers of the size of ln u.
    # Computed from u itself, they would be of size 1, and float32 would lose the
    # digits.
    excess = torch.expm1(log_ratio)
    ratio = log_ratio.exp()
    log_middle = torch.log1p(0.5 * excess)  # ln((1 + u) / 2)
    js = ratio * (log_ratio - log_middle) - log_middle
    return {
        "token_mult_prob_error": log_ratio.abs().exp(),
        "gen_kl_error": excess - log_ratio,
        "policy_kl_error": ratio * log_ratio - excess,
        "js_divergence_error": 0.5 * js,
    }
