"""The clipped policy-gradient loss: GRPO, PPO, DAPO, Dr. GRPO, GSPO, CISPO, REINFORCE.

With `r = p_new / p_old` per token (GSPO: per sequence) and advantage `A`, the loss of a
token is `max(-A r, -A clip(r, 1 - min, 1 + max))`, to which a KL term to a reference
policy may be added. `ClippedPGLossConfig` lists the variants.

Shapes: B rows, T = S - 1 next-token positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.columns import TokenColumns, column, next_token_column
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.importance import importance_weights, truncate_weights
from rl_algorithms.losses.kl import calculate_kl
from rl_algorithms.losses.reductions import masked_mean
from rl_distributed.metrics.values import Max, Mean, MetricValue, Min, Sum
from rl_models.types import LossInputType, LossType

__all__ = ["ClippedPGLossFn"]

_NAME = "ClippedPGLossFn"
_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this: beyond it the clip decides anyway, and exp would
overflow into NaN gradients."""


@dataclass(slots=True)
class _Terms:
    """Everything the loss is made of; what is None was not computed."""

    tokens: TokenColumns
    advantages: Tensor
    """[B, T] or [B, 1]."""
    prev: Tensor
    """[B, T] log-probs when the step began; no gradient."""
    generation: Tensor | None
    """[B, T] log-probs of the sampler."""
    ratio: Tensor
    clipped_ratio: Tensor
    weights: Tensor | None = None
    """[B, T] trainer over sampler, truncated."""
    outside: Tensor | None = None
    """[B, T] which weights were out of bounds."""
    kl: Tensor | None = None
    """[B, T] estimates, before the penalty weight."""


class ClippedPGLossFn:
    """Clipped policy-gradient loss with an optional KL term.

    Columns of the batch, [B, S] unless said otherwise: `advantages` ([B] or [B, S]),
    `token_mask`, `sample_mask` [B]; `prev_logprobs` (absent: the step is exactly
    on-policy, so the current log-probs without gradient stand in);
    `generation_logprobs` (optional unless an importance correction is on, and then the
    mismatch of sampler and trainer is reported); `reference_policy_logprobs` (needed
    when the KL penalty is not 0).

    Args:
        cfg: The options, or a mapping of them.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: ClippedPGLossConfig | Mapping[str, Any]) -> None:
        if not isinstance(cfg, ClippedPGLossConfig):
            cfg = ClippedPGLossConfig.from_dict(dict(cfg), source="loss_fn")
        self.cfg = cfg
        self.loss_type = (
            LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        )

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Give this micro-batch's share of the loss, and its metrics.

        Args:
            data: The columns that the class describes.
            global_valid_seqs: Trained sequences of the global batch.
            global_valid_toks: Trained tokens of the global batch.
            inputs: `next_token_logprobs` [B, S-1].
        """
        terms = self._terms(data, TokenColumns.read(data, inputs, needed_by=_NAME))
        per_token = self._policy_loss(terms)
        if terms.kl is not None:
            per_token = per_token + self.cfg.reference_policy_kl_penalty * terms.kl
        loss = self._aggregate(
            per_token, terms.tokens, global_valid_seqs, global_valid_toks
        )
        with torch.no_grad():
            return loss, _metrics(loss, terms)

    def _terms(self, data: Mapping[str, Any], tokens: TokenColumns) -> _Terms:
        cfg, curr = self.cfg, tokens.logprobs
        on_policy = cfg.force_on_policy_ratio or data.get("prev_logprobs") is None
        prev = curr.detach() if on_policy else self._read(data, "prev_logprobs", curr)
        generation = None
        if cfg.needs_generation_logprobs or data.get("generation_logprobs") is not None:
            generation = self._read(data, "generation_logprobs", curr)
        ratio, clipped = self._ratios(tokens, prev)
        terms = _Terms(
            tokens, self._advantages(data, curr), prev, generation, ratio, clipped
        )
        if generation is not None:
            self._add_weights(terms, generation)
        if cfg.needs_reference_logprobs:
            terms.kl = self._kl(data, terms)
        return terms

    @staticmethod
    def _read(data: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
        value = next_token_column(data, name, like, needed_by=_NAME)
        return value.detach().to(like.dtype)

    @staticmethod
    def _advantages(data: Mapping[str, Any], like: Tensor) -> Tensor:
        advantages = column(data, "advantages", needed_by=_NAME)
        if advantages.dim() == 2 and advantages.shape[1] == like.shape[1] + 1:
            return advantages[:, 1:].to(like.dtype)
        if advantages.dim() == 1 and advantages.shape[0] == like.shape[0]:
            return advantages.unsqueeze(1).to(like.dtype)
        raise LossInputError(
            f"column 'advantages' must be [B] or [B, S] with B={like.shape[0]}, "
            f"S={like.shape[1] + 1}: got {list(advantages.shape)}"
        )

    def _ratios(self, tokens: TokenColumns, prev: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ratio new/old and its clipped twin, 1 where masked."""
        cfg = self.cfg
        log_ratio = tokens.blank(tokens.logprobs - prev)
        if cfg.sequence_level_importance_ratios:
            mean_log = masked_mean(log_ratio, tokens.mask, dim=-1)
            log_ratio = mean_log.unsqueeze(-1).expand_as(log_ratio)
        ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        if cfg.disable_ppo_ratio:
            return ratio, ratio
        return ratio, ratio.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)

    def _add_weights(self, terms: _Terms, generation: Tensor) -> None:
        """Compute trainer over sampler; a metric, and a factor if so configured."""
        mask = terms.tokens.mask
        log_ratio = terms.tokens.blank(terms.prev - generation)
        weights = importance_weights(
            log_ratio,
            sequence_level=self.cfg.sequence_level_importance_ratios,
            mask=mask,
        )
        terms.weights, terms.outside = truncate_weights(
            weights, log_ratio, mask, self.cfg
        )

    def _kl(self, data: Mapping[str, Any], terms: _Terms) -> Tensor:
        cfg, tokens = self.cfg, terms.tokens
        curr = tokens.blank(tokens.logprobs)
        reference = self._read(data, "reference_policy_logprobs", curr)
        weights = None
        if cfg.use_on_policy_kl_approximation and terms.generation is not None:
            log_weight = tokens.blank(tokens.logprobs - terms.generation)
            weights = log_weight.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
            if cfg.reference_policy_kl_gradient == "direct":
                weights = weights.detach()
        elif cfg.reference_policy_kl_gradient == "score_function":
            weights = (curr - curr.detach()).exp()
        return calculate_kl(
            curr,
            tokens.blank(reference),
            cfg.reference_policy_kl_type,
            cfg.kl_input_clamp_value,
            cfg.kl_output_clamp_value,
            weights,
        )

    def _policy_loss(self, terms: _Terms) -> Tensor:
        """Return the [B, T] policy-gradient loss without the KL term."""
        cfg, advantages = self.cfg, terms.advantages
        if cfg.disable_ppo_ratio:
            loss = -advantages * terms.tokens.blank(terms.tokens.logprobs)
        elif cfg.use_cispo:
            curr = terms.tokens.blank(terms.tokens.logprobs)
            loss = -advantages * terms.clipped_ratio.detach() * curr
        else:
            loss = torch.maximum(
                -advantages * terms.ratio, -advantages * terms.clipped_ratio
            )
            if cfg.ratio_clip_c is not None:
                bounded = torch.minimum(loss, -advantages * cfg.ratio_clip_c)
                loss = torch.where(advantages < 0, bounded, loss)
        if cfg.use_importance_sampling_correction and terms.weights is not None:
            loss = loss * terms.weights
        return loss

    def _aggregate(
        self,
        per_token: Tensor,
        tokens: TokenColumns,
        num_seqs: Tensor,
        num_toks: Tensor,
    ) -> Tensor:
        if self.cfg.token_level_loss:
            return masked_mean(
                per_token, tokens.mask, global_normalization_factor=num_toks
            )
        per_sequence = masked_mean(
            per_token,
            tokens.token_mask,
            dim=-1,
            global_normalization_factor=self.cfg.fixed_length_normalizer,
        )
        return masked_mean(
            per_sequence, tokens.sample_mask, global_normalization_factor=num_seqs
        )


def _metrics(loss: Tensor, terms: _Terms) -> dict[str, MetricValue]:
    """Reduce everything worth knowing to numbers, looking at trained tokens only."""
    tokens = terms.tokens
    trained = (~tokens.masked_out).flatten().nonzero().squeeze(-1)

    def take(values: Tensor) -> Tensor:
        return values.detach().flatten().index_select(0, trained)

    weights, logprobs = take(tokens.mask), take(tokens.logprobs)
    ratio, clipped = take(terms.ratio), take(terms.clipped_ratio)
    means = {
        "probs_ratio": ratio,
        "probs_ratio_clamped": clipped,
        "clip_fraction": (ratio != clipped).to(ratio.dtype),
        "approx_entropy": -logprobs,
    }
    if terms.kl is not None:
        means["kl_penalty"] = take(terms.kl)
    if terms.generation is not None:
        means |= _mismatch(logprobs, take(terms.prev), take(terms.generation))
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
    difference = (generation - prev).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    weight = (curr - generation).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
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
