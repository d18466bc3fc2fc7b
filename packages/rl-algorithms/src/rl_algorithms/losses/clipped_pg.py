"""The clipped policy-gradient loss: GRPO, PPO, DAPO, Dr. GRPO, GSPO, CISPO, REINFORCE.

`ClippedPGLossConfig` lists the variants.

Shapes: B rows, T = S - 1 next-token positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.losses.columns import LossRows
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.kept_rows import kept_logprobs
from rl_algorithms.losses.options import read_options
from rl_algorithms.losses.policy_columns import COLUMNS, ClippedPGLossDataDict
from rl_algorithms.losses.policy_metrics import policy_metrics
from rl_algorithms.losses.policy_terms import PolicyTerms
from rl_algorithms.losses.reductions import masked_mean
from rl_distributed.metrics.values import MetricValue
from rl_models.types import LossInputType, LossType

__all__ = ["ClippedPGLossDataDict", "ClippedPGLossFn"]


class ClippedPGLossFn:
    r"""Clipped policy-gradient loss with an optional KL term.

    With $r = \frac{p_{\text{new}}}{p_{\text{old}}}$ per token (GSPO: per sequence), the
    advantage $A$, and `ratio_clip_min` and `ratio_clip_max` as $a$ and $b$, the loss of
    a token is (Schulman et al., arXiv:1707.06347)

    $$
    \max\left( -A r, -A \operatorname{clip}(r, 1 - a, 1 + b) \right)
    $$

    to which a KL term to a reference policy, an entropy bonus and the negative
    log-likelihood of successful answers may be added.

    Columns of the batch, [B, S] unless stated otherwise: `advantages` ([B] or [B, S]);
    `token_mask`; `sample_mask` [B]; `prev_logprobs` (without it the step is exactly
    on-policy, and the current log-probs without gradient are used);
    `generation_logprobs` (required with an importance correction, otherwise optional
    and used to report the mismatch of sampler and trainer);
    `reference_policy_logprobs` (required if the loss has a KL term); `nll_weights` [B]
    (required with `positive_nll_coef`: 0 for rows that did not succeed, and for the
    others the number of trained tokens in the global batch divided by that in all
    successful rows); `kept_row` [B], if the log-probs of single rows are wanted: see
    `RowLogprobs`.

    Args:
        config: The options, or a mapping of them, which is validated.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, config: ClippedPGLossConfig | Mapping[str, Any]) -> None:
        self.config = read_options(ClippedPGLossConfig, config, "ClippedPGLossFn")
        self._length_normalizer = self.config.length_normalizer
        by_token = self.config.token_level_loss
        self.loss_type = LossType.TOKEN_LEVEL if by_token else LossType.SEQUENCE_LEVEL

    def __call__(
        self,
        data: LossRows[ClippedPGLossDataDict],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Return this micro-batch's share of the loss, and its metrics.

        Args:
            data: The columns described in the class.
            global_valid_seqs: Number of trained sequences in the global batch.
            global_valid_toks: Number of trained tokens in the global batch.
            inputs: `next_token_logprobs` [B, S-1].
        """
        config = self.config
        rows = COLUMNS.read(data)
        terms = PolicyTerms.read(rows, inputs, config)
        per_token = self._policy_loss(terms)
        if terms.kl is not None:
            per_token = per_token + config.reference_policy_kl_penalty * terms.kl
        if terms.entropy is not None:
            per_token = per_token - config.entropy_coef * terms.entropy
        if terms.nll is not None:
            per_token = per_token + config.positive_nll_coef * terms.nll
        loss = self._aggregate(per_token, terms, global_valid_seqs, global_valid_toks)
        with torch.no_grad():
            found = kept_logprobs(rows, terms.prev)
            return loss, policy_metrics(loss, terms) | found

    def _policy_loss(self, terms: PolicyTerms) -> Tensor:
        """Return the [B, T] policy-gradient loss without the other terms."""
        config, advantages = self.config, terms.advantages
        if config.disable_ppo_ratio:
            # The ratio is left to the metrics: REINFORCE differentiates log p directly.
            loss = -advantages * terms.tokens.blank(terms.tokens.logprobs)
        elif config.use_cispo:
            curr = terms.tokens.blank(terms.tokens.logprobs)
            # Detached: in CISPO the ratio is a weight, and the gradient flows through
            # log p.
            loss = -advantages * terms.clipped_ratio.detach() * curr
        else:
            loss = torch.maximum(
                -advantages * terms.ratio, -advantages * terms.clipped_ratio
            )
            if config.ratio_clip_c is not None:
                # Dual clip (Ye et al., arXiv:1912.09729): with a negative advantage the
                # loss has no upper bound in the ratio otherwise.
                bounded = torch.minimum(loss, -advantages * config.ratio_clip_c)
                loss = torch.where(advantages < 0, bounded, loss)
        if config.use_importance_sampling_correction and terms.weights is not None:
            # Not in the ratio, where the clip would judge the sampler's numerics as if
            # they were steps of the policy.
            loss = loss * terms.weights
        return loss

    def _aggregate(
        self,
        per_token: Tensor,
        terms: PolicyTerms,
        num_seqs: Tensor,
        num_toks: Tensor,
    ) -> Tensor:
        tokens = terms.tokens
        if self.config.token_level_loss:
            return masked_mean(
                per_token, tokens.mask, global_normalization_factor=num_toks
            )
        per_sequence = masked_mean(
            per_token,
            # Without the sample mask, which the mean over sequences applies: with a
            # fixed normalizer a row's weight would count twice.
            tokens.token_mask,
            dim=-1,
            global_normalization_factor=self._length_normalizer,
        )
        return masked_mean(
            per_sequence, tokens.sample_mask, global_normalization_factor=num_seqs
        )
