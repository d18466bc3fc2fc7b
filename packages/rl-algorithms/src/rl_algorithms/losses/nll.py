"""The loss of supervised fine-tuning: negative log-likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.losses.columns import LossColumns, LossRows, TokenColumns, TokenMasks
from rl_algorithms.losses.reductions import masked_mean
from rl_distributed.metrics.values import MetricValue, Sum
from rl_models.types import LossInputType, LossType

__all__ = ["NLLLossFn"]

_COLUMNS = LossColumns(TokenMasks, "NLLLossFn")


class NLLLossFn:
    r"""Cross-entropy, averaged over the trained tokens $M$ of the global batch.

    $$
    -\frac{1}{|M|} \sum_{t \in M} \log \pi(y_t \mid y_{<t})
    $$
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        data: LossRows[TokenMasks],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Return this micro-batch's share of the loss, and its metrics.

        Args:
            data: `token_mask` [B, S] and `sample_mask` [B].
            global_valid_seqs: Not used.
            global_valid_toks: Number of trained tokens in the global batch.
            inputs: `next_token_logprobs` [B, S-1].
        """
        columns = TokenColumns.read(
            _COLUMNS.read(data), inputs, needed_by=_COLUMNS.loss
        )
        loss = -masked_mean(
            columns.logprobs,
            columns.mask,
            global_normalization_factor=global_valid_toks,
        )
        with torch.no_grad():
            # Stacked, so that the numbers reach the host in one transfer.
            numbers = torch.stack(
                (loss.detach(), columns.mask.sum(), columns.sample_mask.sum())
            ).tolist()
        return loss, {
            "loss": Sum(numbers[0]),
            "num_unmasked_tokens": Sum(numbers[1]),
            "num_valid_samples": Sum(numbers[2]),
        }
