"""The loss of direct preference optimization and its variants.

Shapes: B pairs are 2 B rows, chosen and rejected alternating; S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.columns import (
    LossColumns,
    LossRows,
    TokenColumns,
    TokenMasks,
    next_tokens,
)
from rl_algorithms.losses.dpo_config import DPOLossConfig
from rl_algorithms.losses.options import read_options
from rl_algorithms.losses.reductions import masked_mean
from rl_distributed.metrics.values import Mean, MetricValue, Sum
from rl_models.types import LossInputType, LossType

__all__ = ["DPOLossDataDict", "DPOLossFn"]


class DPOLossDataDict(TokenMasks):
    """Columns of `DPOLossFn`."""

    reference_policy_logprobs: Annotated[
        Tensor,
        "[2 B, S] per token or [2 B] summed over the answers; take it from "
        "policy.get_reference_policy_logprobs",
    ]


_COLUMNS = LossColumns(DPOLossDataDict, "DPOLossFn")


class DPOLossFn:
    r"""The loss of DPO over interleaved pairs (Rafailov et al., arXiv:2305.18290).

    With $w$ and $l$ the chosen and the rejected answer to $x$, $\log \pi$ summed (or
    averaged) over an answer's tokens, and the implicit reward

    $$
    r(y) = \beta \left( \log \pi(y \mid x) - \log \pi_{\text{ref}}(y \mid x) \right)
    $$

    `preference_loss=sigmoid` is

    $$
    -(1 - \varepsilon) \log \operatorname{sigmoid}(r(w) - r(l))
    - \varepsilon \log \operatorname{sigmoid}(r(l) - r(w))
    $$

    where $\varepsilon$ is `label_smoothing`, and `ipo` (Azar et al., arXiv:2310.12036)

    $$
    \left( \frac{r(w) - r(l)}{\beta} - \frac{1}{2 \beta} \right)^2
    $$

    Both are averaged over the pairs of the global batch.

    Args:
        config: Variant, beta and weights; a mapping is validated.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_group = 2

    def __init__(self, config: DPOLossConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_options(DPOLossConfig, config, "DPOLossFn")

    def __call__(
        self,
        data: LossRows[DPOLossDataDict],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Return this micro-batch's share of the loss, and its metrics.

        Args:
            data: `token_mask` [2 B, S], `sample_mask` [2 B] and
                `reference_policy_logprobs`, [2 B, S] per token or [2 B] summed over
                the answers.
            global_valid_seqs: Number of valid rows in the global batch, two per pair.
            global_valid_toks: Not used.
            inputs: `next_token_logprobs` [2 B, S-1].
        """
        config = self.config
        rows = _COLUMNS.read(data)
        columns = TokenColumns.read(rows, inputs, needed_by=_COLUMNS.loss)
        # An odd number means that a micro-batch has split a pair, and all later rows
        # would be compared with the wrong answer.
        if len(columns.logprobs) % 2:
            raise LossInputError(
                "DPOLossFn takes rows in pairs, chosen and rejected alternating: got "
                f"{len(columns.logprobs)} rows"
            )
        # float64, because sums over long answers are large compared to their
        # differences.
        num_tokens = columns.token_mask.sum(-1, dtype=torch.float64)
        policy = _answer_sums(columns.logprobs, columns)
        log_ratio = policy - self._reference(rows, columns)
        # Padding rows have no trained token; they count 0, but 0 / 0 would still be
        # NaN.
        lengths = num_tokens.clamp(min=1.0)
        if config.preference_average_log_probs:
            log_ratio = log_ratio / lengths
        rewards = config.reference_policy_kl_penalty * log_ratio
        chosen, rejected = rewards[0::2], rewards[1::2]
        # A pair needs both of its answers.
        counts = (columns.sample_mask[0::2] * columns.sample_mask[1::2]).double()
        num_pairs = global_valid_seqs.double() / 2
        preference = self._average(
            self._pair_loss(chosen - rejected), counts, num_pairs
        )
        nll = -policy[0::2]
        if config.sft_average_log_probs:
            nll = nll / lengths[0::2]
        sft = self._average(nll, counts, num_pairs)
        loss = config.preference_loss_weight * preference + config.sft_loss_weight * sft
        if config.preference_average_log_probs:
            policy = policy / lengths
        with torch.no_grad():
            metrics = _metrics(chosen, rejected, policy, counts)
            shares = torch.stack((loss, preference, sft)).tolist()
        names = ("loss", "preference_loss", "sft_loss")
        metrics |= {n: Sum(share) for n, share in zip(names, shares, strict=True)}
        return loss, metrics

    @staticmethod
    def _reference(rows: DPOLossDataDict, columns: TokenColumns) -> Tensor:
        """Return [2 B], the log-probs of the answers under the reference policy."""
        values = rows["reference_policy_logprobs"]
        if values.dim() == 1:
            # `where` and not a product: sums of padding rows may be NaN.
            return torch.where(columns.sample_mask != 0, values.double(), 0.0)
        values = next_tokens(values, "reference_policy_logprobs", columns.logprobs)
        return _answer_sums(values, columns)

    def _pair_loss(self, margin: Tensor) -> Tensor:
        """Return [B], the losses of the reward margins."""
        beta, smoothing = (
            self.config.reference_policy_kl_penalty,
            self.config.label_smoothing,
        )
        if self.config.preference_loss == "ipo":
            # The margin includes beta already, so both terms of the equation share the
            # divisor.
            return ((margin - 0.5) / beta).square()
        # logsigmoid stays finite where log(sigmoid(x)) underflows to -inf.
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)

    @staticmethod
    def _average(values: Tensor, counts: Tensor, num_pairs: Tensor) -> Tensor:
        return masked_mean(values, counts, global_normalization_factor=num_pairs)


def _answer_sums(logprobs: Tensor, columns: TokenColumns) -> Tensor:
    """Return [2 B] float64 sums over the trained tokens; 0 for invalid rows."""
    return columns.blank(logprobs).sum(-1, dtype=torch.float64)


def _metrics(
    chosen: Tensor, rejected: Tensor, policy: Tensor, counts: Tensor
) -> dict[str, MetricValue]:
    is_right = (chosen > rejected).double()
    # Needs no reference, so that it is informative even before the first step, when
    # policy and reference are equal and all rewards are 0.
    prefers = (policy[0::2] > policy[1::2]).double()
    columns = {
        "accuracy": is_right,
        "policy_accuracy": prefers,
        "rewards_chosen_mean": chosen,
        "rewards_rejected_mean": rejected,
        "rewards_margin_mean": chosen - rejected,
        "logprobs_chosen_mean": policy[0::2],
        "logprobs_rejected_mean": policy[1::2],
    }
    sums = (torch.stack(list(columns.values())) * counts).sum(-1).tolist()
    count = float(counts.sum())
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(columns, sums, strict=True)
    }
    return {**metrics, "num_valid_samples": Sum(count)}
