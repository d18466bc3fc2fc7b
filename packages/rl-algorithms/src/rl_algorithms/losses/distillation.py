"""Distillation on the teacher's top k tokens (Agarwal et al., arXiv:2306.13649, GKD).

The loss of a trained position is a divergence between teacher p and student q, see
`losses.divergence`. `DistillationLossConfig` defines the tokens over which p and q are
distributions. Shapes: B rows, S tokens, k tokens of the teacher; N trained positions, E
events (k, or k + 1 with the bucket).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.columns import LossColumns, LossRows, TokenMasks
from rl_algorithms.losses.distillation_config import DistillationLossConfig
from rl_algorithms.losses.divergence import (
    divergence,
    divergence_outside,
    with_bucket,
)
from rl_algorithms.losses.options import read_options
from rl_algorithms.losses.reductions import masked_mean
from rl_distributed.metrics.values import Mean, MetricValue, Sum
from rl_models.types import LossInputType, LossType

__all__ = ["DistillationLossDataDict", "DistillationLossFn"]

_NAME = "DistillationLossFn"


class DistillationLossDataDict(TokenMasks):
    """Columns of `DistillationLossFn`."""

    topk_logits: Annotated[
        Tensor, "[B, S, k]; take it from the teacher's get_topk_logits"
    ]
    topk_log_normalizer: Annotated[
        Tensor, "[B, S]; take it from the teacher's get_topk_logits"
    ]


_COLUMNS = LossColumns(DistillationLossDataDict, _NAME)


class DistillationLossFn:
    r"""A divergence between teacher and student, averaged over the trained tokens.

    With $p$ the teacher's and $q$ the student's distribution at a position, and $M$ the
    trained tokens of the global batch, the forward form is

    $$
    \frac{1}{|M|} \sum_{t \in M} \sum_i p_{t,i}
    \left( \log p_{t,i} - \log q_{t,i} \right)
    $$

    `losses.divergence` has the other forms (Agarwal et al., arXiv:2306.13649).

    $q$ is always that of the weights being trained, and the sampled token itself is not
    in the loss of its position. So answers of older weights (`asynchronous`) need no
    ratio of policy to sampler. That older weights have chosen the prefixes is not
    corrected, and no gradient is taken through that choice, as in GKD.

    Args:
        config: The divergence and its tokens; a mapping is validated.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION

    def __init__(
        self, config: DistillationLossConfig | Mapping[str, Any] | None = None
    ) -> None:
        self.config = read_options(DistillationLossConfig, config, "DistillationLossFn")
        self.needs_entropy = self.config.needs_entropy
        """Whether the training backend must provide `student_entropy`."""

    def __call__(
        self,
        data: LossRows[DistillationLossDataDict],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Return this micro-batch's share of the loss, and its metrics.

        Args:
            data: `token_mask` [B, S], `sample_mask` [B], and the columns of the
                teacher's `get_topk_logits`: `topk_logits` [B, S, k] and
                `topk_log_normalizer` [B, S].
            global_valid_seqs: Not used.
            global_valid_toks: Number of trained tokens in the global batch.
            inputs: `student_topk_logits` [B, S-1, k], `student_log_normalizer`
                [B, S-1], and `student_entropy` [B, S-1] if it is needed.
        """
        config = self.config
        student = self._input(inputs, "student_topk_logits")
        rows = _COLUMNS.read(data)
        # The last position predicts nothing.
        teacher = rows["topk_logits"][:, :-1].to(student.dtype)
        if teacher.shape != student.shape:
            raise LossInputError(
                "column 'topk_logits' without its last position must be "
                f"{list(student.shape)}: got {list(teacher.shape)}"
            )
        # Column i of the logits predicts token i + 1, so masks lose their first
        # position and logits their last.
        weights = rows["token_mask"][:, 1:].to(student.dtype)
        weights = weights * rows["sample_mask"][:, None]
        # Continue with trained positions only: others may even be NaN, and cost time.
        here = weights != 0
        weights, teacher, student = weights[here], teacher[here], student[here]
        p_norm = rows["topk_log_normalizer"][:, :-1].to(student.dtype)[here]
        q_norm = self._input(inputs, "student_log_normalizer")[here]
        p_whole, q_whole = teacher - p_norm[:, None], student - q_norm[:, None]
        p, q = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
        if config.bucket_outside_topk:
            p, q = with_bucket(p_whole), with_bucket(q_whole)
        elif config.zero_outside_topk:
            # q keeps its mass outside of the top k, where p is set to 0:
            # `divergence_outside` adds that part.
            q = q_whole
        values = divergence(p, q, config.kl_type, config.mixed_kl_weight)
        if config.zero_outside_topk:
            entropy = None
            if self.needs_entropy:
                entropy = self._input(inputs, "student_entropy")[here]
            values = values + divergence_outside(
                q, entropy, config.kl_type, config.mixed_kl_weight
            )
        loss = masked_mean(
            values, weights, global_normalization_factor=global_valid_toks
        )
        return loss, _metrics(loss, weights, p_whole, q_whole)

    @staticmethod
    def _input(inputs: Mapping[str, Tensor], name: str) -> Tensor:
        if name not in inputs:
            raise LossInputError(
                f"{_NAME} is computed from {name}: got "
                f"{', '.join(sorted(inputs)) or 'nothing'}; a training backend gives "
                "it for LossInputType.DISTILLATION"
            )
        return inputs[name]


@torch.no_grad()
def _metrics(
    loss: Tensor, weights: Tensor, teacher: Tensor, student: Tensor
) -> dict[str, MetricValue]:
    """Return the metrics of [N, k] log-probs."""
    agrees = (student.argmax(-1) == teacher.argmax(-1)).to(weights.dtype)
    columns = (teacher.exp().sum(-1), student.exp().sum(-1), agrees)
    sums = [(values * weights).sum() for values in columns]
    # One transfer to the host for all numbers.
    share, count, *totals = torch.stack((loss, weights.sum(), *sums)).tolist()
    names = ("teacher_topk_mass", "student_topk_mass", "top1_agreement")
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(names, totals, strict=True)
    }
    return {**metrics, "loss": Sum(share), "num_unmasked_tokens": Sum(count)}
