"""The terms of a policy-gradient loss: ratios, importance weights, KL, entropy.

Shapes: B rows, T = S - 1 next-token positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.columns import TokenColumns, next_tokens
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.importance import importance_weights, truncate_weights
from rl_algorithms.losses.kl import calculate_kl
from rl_algorithms.losses.policy_columns import COLUMNS, ClippedPGLossDataDict
from rl_algorithms.losses.reductions import masked_mean

__all__ = ["MAX_LOG_RATIO", "PolicyTerms", "bounded_exp"]

MAX_LOG_RATIO = 20.0
"""Bound on absolute log-ratios: beyond it the clip takes effect anyway, and exp would
overflow and lead to NaN gradients."""


@dataclass(slots=True)
class PolicyTerms:
    """The terms of the loss; None for those that were not computed."""

    tokens: TokenColumns
    advantages: Tensor
    """[B, T] or [B, 1]."""
    prev: Tensor
    """[B, T] log-probs before the step, without gradient."""
    generation: Tensor | None
    """[B, T] log-probs of the sampler."""
    ratio: Tensor
    clipped_ratio: Tensor
    weights: Tensor | None = None
    """[B, T] truncated importance weights, trainer over sampler."""
    outside: Tensor | None = None
    """[B, T] bool, whether a weight was out of bounds."""
    kl: Tensor | None = None
    """[B, T] estimates of the KL divergence, not weighted."""
    entropy: Tensor | None = None
    """[B, T] estimates of the entropy, not weighted."""
    nll: Tensor | None = None
    """[B, T] negative log-likelihood of successful answers, weighted so that its mean
    over all tokens is the mean over theirs."""

    @classmethod
    def read(
        cls,
        rows: ClippedPGLossDataDict,
        inputs: Mapping[str, Tensor],
        config: ClippedPGLossConfig,
    ) -> PolicyTerms:
        """Compute the terms required by `config` from the columns of a batch."""
        tokens = TokenColumns.read(rows, inputs, needed_by=COLUMNS.loss)
        curr, prev = tokens.logprobs, rows.get("prev_logprobs")
        if config.force_on_policy_ratio or prev is None:
            # Detached, so that the ratio is 1 but still has the gradient of log p.
            prev = curr.detach()
        else:
            prev = _constant(rows, "prev_logprobs", prev, curr)
        generation = _generation(rows, curr, config)
        ratio, clipped = _ratios(tokens, prev, config)
        terms = cls(tokens, _advantages(rows, curr), prev, generation, ratio, clipped)
        # Computed even without a correction, as the metrics of the mismatch report
        # them.
        if generation is not None:
            terms.weights, terms.outside = _weights(terms, generation, config)
        if config.has_kl_term:
            terms.kl = _kl(rows, terms, config)
        if config.entropy_coef > 0:
            terms.entropy = _entropy(terms)
        if config.positive_nll_coef > 0:
            terms.nll = _positive_nll(rows, tokens)
        return terms


def _constant(
    rows: ClippedPGLossDataDict,
    name: str,
    value: Tensor | None,
    like: Tensor,
    why: str = "",
) -> Tensor:
    """Return a column of log-probs [B, S] as [B, T], without gradient."""
    value = next_tokens(COLUMNS.need(value, name, rows, why), name, like)
    # Columns are data: only the log-probs of the current forward pass carry a gradient.
    return value.detach().to(like.dtype)


def _generation(
    rows: ClippedPGLossDataDict, like: Tensor, config: ClippedPGLossConfig
) -> Tensor | None:
    """Return the sampler's log-probs, or None if missing and not needed."""
    found = rows.get("generation_logprobs")
    if found is not None:
        return _constant(rows, "generation_logprobs", found, like)
    needing = config.names_needing_generation_logprobs
    if needing:
        raise LossInputError(
            f"{' and '.join(f'loss_fn.{name}' for name in needing)} compares the "
            "log-probs of sampler and trainer, but the batch has no column "
            "generation_logprobs: have the generator's generate return the column "
            f"logprobs, or set {'it' if len(needing) == 1 else 'both'} to false"
        )
    return None


def _advantages(rows: ClippedPGLossDataDict, like: Tensor) -> Tensor:
    advantages = rows["advantages"]
    if advantages.dim() == 2 and advantages.shape[1] == like.shape[1] + 1:
        return advantages[:, 1:].to(like.dtype)
    if advantages.dim() == 1 and advantages.shape[0] == like.shape[0]:
        # [B, 1], which broadcasts over an answer's tokens.
        return advantages.unsqueeze(1).to(like.dtype)
    raise LossInputError(
        f"column 'advantages' must be [B] or [B, S] with B={like.shape[0]}, "
        f"S={like.shape[1] + 1}: got {list(advantages.shape)}"
    )


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, with the log-ratio clamped to +-MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _ratios(
    tokens: TokenColumns, prev: Tensor, config: ClippedPGLossConfig
) -> tuple[Tensor, Tensor]:
    """Return the ratio new/old and the clipped ratio; 1 where masked."""
    # Blanked before exp: masked positions may hold NaN, whose gradient would reach the
    # rest.
    log_ratio = tokens.blank(tokens.logprobs - prev)
    if config.sequence_level_importance_ratios:
        mean_log = masked_mean(log_ratio, tokens.mask, dim=-1)
        log_ratio = mean_log.unsqueeze(-1).expand_as(log_ratio)
    # Bounded even before the clip: max() in the loss also reads the ratio that is not
    # clipped.
    ratio = bounded_exp(log_ratio)
    if config.disable_ppo_ratio:
        return ratio, ratio
    return ratio, ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)


def _weights(
    terms: PolicyTerms, generation: Tensor, config: ClippedPGLossConfig
) -> tuple[Tensor, Tensor]:
    """Return trainer over sampler: always a metric, and a factor if configured."""
    mask = terms.tokens.mask
    log_ratio = terms.tokens.blank(terms.prev - generation)
    weights = importance_weights(
        log_ratio, sequence_level=config.sequence_level_importance_ratios, mask=mask
    )
    return truncate_weights(weights, log_ratio, mask, config)


def _kl(
    rows: ClippedPGLossDataDict, terms: PolicyTerms, config: ClippedPGLossConfig
) -> Tensor:
    tokens = terms.tokens
    curr = tokens.blank(tokens.logprobs)
    name, found = "reference_policy_logprobs", rows.get("reference_policy_logprobs")
    why = " with reference_policy_kl_penalty"
    reference = _constant(rows, name, found, curr, why)
    weights = None
    if config.use_on_policy_kl_approximation and terms.generation is not None:
        # Detached: the weight corrects for the sampler's distribution, and is not
        # itself optimized.
        weights = bounded_exp(curr.detach() - tokens.blank(terms.generation))
    kl = calculate_kl(
        curr,
        tokens.blank(reference),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
        weights,
    )
    if config.reference_policy_kl_gradient == "score_function":
        # Multiplied after clamping: where a bound cuts an estimate off, its own
        # gradient is 0, and only that through the sampling distribution remains.
        kl = kl * _score_function(curr)
    return kl


def _score_function(logprobs: Tensor) -> Tensor:
    """Return 1, with the gradient of `log p`."""
    return (logprobs - logprobs.detach()).exp()


def _entropy(terms: PolicyTerms) -> Tensor:
    """Estimate the entropy so that value and gradient have the right expectation.

    With tokens of the old policy and w = new / old, the mean of -w log p is the
    entropy. Its gradient is -(w log p + w) d log p, whose second part has mean 0 and
    only adds noise, so it is removed.
    """
    tokens = terms.tokens
    curr = tokens.blank(tokens.logprobs)
    weight = bounded_exp(curr - tokens.blank(terms.prev))
    return weight - weight.detach() - weight * curr


def _positive_nll(rows: ClippedPGLossDataDict, tokens: TokenColumns) -> Tensor:
    found, why = rows.get("nll_weights"), " with positive_nll_coef"
    weights = COLUMNS.need(found, "nll_weights", rows, why)
    num_rows = tokens.logprobs.shape[0]
    if weights.shape != (num_rows,):
        raise LossInputError(
            f"column 'nll_weights' must be [B] = [{num_rows}]: got "
            f"{list(weights.shape)}"
        )
    nll = -tokens.blank(tokens.logprobs)
    return weights.to(nll.dtype).unsqueeze(1) * nll
