"""The numbers that a policy-gradient loss reports, each over trained tokens only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_algorithms.losses.mismatch import log_ratios_by_position
from rl_algorithms.losses.policy_terms import MAX_LOG_RATIO, PolicyTerms
from rl_distributed.metrics.values import Max, Mean, MetricValue, Min, Sum

__all__ = ["policy_metrics"]


def policy_metrics(loss: Tensor, terms: PolicyTerms) -> dict[str, MetricValue]:
    """Reduce everything worth knowing to numbers, looking at trained tokens only."""
    tokens = terms.tokens
    trained = (~tokens.masked_out).flatten().nonzero().squeeze(-1)

    def take(values: Tensor) -> Tensor:
        return values.detach().flatten().index_select(0, trained)

    weights, logprobs = take(tokens.mask), take(tokens.logprobs)
    prev = take(terms.prev)
    moved = logprobs - prev
    ratio, clipped = take(terms.ratio), take(terms.clipped_ratio)
    means = {
        "probs_ratio": ratio,
        "probs_ratio_clamped": clipped,
        "clip_fraction": (ratio != clipped).to(ratio.dtype),
        "approx_entropy": -logprobs,
        "approx_kl": torch.expm1(moved.clamp(max=MAX_LOG_RATIO)) - moved,
    }
    if terms.kl is not None:
        means["kl_penalty"] = take(terms.kl)
    if terms.entropy is not None:
        means["entropy_bonus"] = take(terms.entropy)
    if terms.nll is not None:
        means["positive_nll"] = take(terms.nll)
    if terms.generation is not None:
        means |= _mismatch(logprobs, prev, take(terms.generation))
    if terms.weights is not None and terms.outside is not None:
        means["sampling_importance_ratio"] = take(terms.weights)
        means["is_oob_ratio"] = take(terms.outside).to(ratio.dtype)
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
        log_ratio = prev - take(terms.generation)
        positions = trained % terms.prev.shape[1] + 1
        metrics |= log_ratios_by_position(log_ratio, positions)
    metrics["loss"] = Sum(value)
    metrics["num_valid_samples"] = Sum(num_rows)
    if extrema:  # A micro-batch without trained tokens has no smallest ratio.
        low, high, clipped_low, clipped_high = numbers[-4:]
        metrics["probs_ratio_min"] = Min(low)
        metrics["probs_ratio_max"] = Max(high)
        metrics["probs_ratio_clamped_min"] = Min(clipped_low)
        metrics["probs_ratio_clamped_max"] = Max(clipped_high)
    return metrics


def _mismatch(curr: Tensor, prev: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """How far the sampler's log-probs are from the trainer's, per trained token.

    `token_mult_prob_error` is `exp|difference|`, 1 when they agree; the divergences are
    k3 estimates, 0 when they agree. The entropy is weighted by policy over sampler.
    """
    difference = (generation - prev).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = (curr - generation).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # log of the even mixture, relative to either: log((1 + e^d) / 2) and minus d
    from_prev = torch.nn.functional.softplus(difference) - math.log(2.0)
    from_generation = from_prev - difference
    return {
        "token_mult_prob_error": difference.abs().exp(),
        "gen_kl_error": torch.expm1(-difference) + difference,
        "policy_kl_error": torch.expm1(difference) - difference,
        "js_divergence_error": 0.5
        * (
            torch.expm1(from_prev)
            - from_prev
            + torch.expm1(from_generation)
            - from_generation
        ),
        "approx_entropy": -weight * curr,
    }
