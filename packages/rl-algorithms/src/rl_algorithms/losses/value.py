"""The critic's loss: squared error of the returns, with PPO's clipping.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.columns import (
    LossColumns,
    LossRows,
    TokenMasks,
    next_tokens,
)
from rl_algorithms.losses.options import read_options
from rl_algorithms.losses.reductions import masked_mean
from rl_algorithms.losses.value_config import MseValueLossConfig
from rl_distributed.metrics.values import Mean, MetricValue, Sum
from rl_models.types import LossInputType, LossType

__all__ = ["MseValueLossDataDict", "MseValueLossFn"]

_NAME = "MseValueLossFn"


class MseValueLossDataDict(TokenMasks):
    """Columns of `MseValueLossFn`."""

    returns: Annotated[
        Tensor, "[B, S] of each token; compute it with rl_algorithms.advantages"
    ]
    values: NotRequired[
        Annotated[
            Tensor,
            "[B, S] before the step; take it from critic.get_values, or set cliprange "
            "to null",
        ]
    ]


_COLUMNS = LossColumns(MseValueLossDataDict, _NAME)


class MseValueLossFn:
    r"""Squared error of the values of a critic, clipped like PPO's reference code.

    With $v$ the value of the state in which a token was chosen, $v_{\text{old}}$ that
    before the step, $R$ the return, $c$ the clip range and $s$ the scale, the loss of a
    token is

    $$
    \frac{s}{2} \max\left( (v - R)^2,
    (\operatorname{clip}(v, v_{\text{old}} - c, v_{\text{old}} + c) - R)^2 \right)
    $$

    averaged over the trained tokens of the global batch (Schulman et al.,
    arXiv:1707.06347; values are clipped as in openai/baselines).

    Columns of the batch, [B, S]: `returns` of each token, `token_mask`, `sample_mask`
    [B]; with clipping also `values`, from `get_values` before the step.

    Args:
        config: The options, or a mapping of them, which is validated.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE

    def __init__(
        self, config: MseValueLossConfig | Mapping[str, Any] | None = None
    ) -> None:
        self.config = read_options(MseValueLossConfig, config, "MseValueLossFn")

    def __call__(
        self,
        data: LossRows[MseValueLossDataDict],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Return this micro-batch's share of the loss, and its metrics.

        Args:
            data: The columns described in the class.
            global_valid_seqs: Not used.
            global_valid_toks: Number of trained tokens in the global batch.
            inputs: `values` [B, S]; entry i is of the state after tokens 0 to i.
        """
        values = _values(inputs)
        rows = _COLUMNS.read(data)
        token_mask = next_tokens(rows["token_mask"], "token_mask", values)
        sample_mask = rows["sample_mask"].to(values.dtype)
        mask = token_mask.to(values.dtype) * sample_mask[:, None]
        masked_out = mask == 0
        values = values.masked_fill(masked_out, 0.0)
        # Returns are targets: a gradient through them would move the target to the
        # value.
        returns = next_tokens(rows["returns"], "returns", values).detach()
        returns = returns.to(values.dtype).masked_fill(masked_out, 0.0)
        error = (values - returns).square()
        clipped = masked_out.new_zeros(())
        if self.config.cliprange is not None:
            # Values are of the state after a token, returns of the token itself: one
            # drops the last position, the other the first.
            old = _COLUMNS.need(rows.get("values"), "values", rows, " with cliprange")
            old = old[:, :-1].detach().to(values.dtype).masked_fill(masked_out, 0.0)
            low, high = old - self.config.cliprange, old + self.config.cliprange
            held = torch.minimum(torch.maximum(values, low), high)
            clipped = (held - returns).square() > error
            # The larger error, so that clipping never hides a value that moved away
            # from its return.
            error = torch.maximum(error, (held - returns).square())
        loss = (0.5 * self.config.scale) * masked_mean(
            error, mask, global_normalization_factor=global_valid_toks
        )
        with torch.no_grad():
            return loss, _metrics(loss, values, returns, clipped, mask)


def _values(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return [B, S-1], the values of the states in which tokens 1 to S-1 are chosen."""
    values = inputs.get("values")
    if values is None:
        raise LossInputError(
            f"{_NAME} is computed from values: got "
            f"{', '.join(sorted(inputs)) or 'nothing'}; call it with values=[B, S]"
        )
    return values[:, :-1]


def _metrics(
    loss: Tensor, values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, MetricValue]:
    columns = {
        "value_mean": values,
        "return_mean": returns,
        "value_error": (values - returns).abs(),
        "value_clip_fraction": clipped.to(values.dtype).expand_as(values),
    }
    totals = [(value * mask).sum() for value in columns.values()]
    # One transfer to the host for all numbers.
    numbers = torch.stack([*totals, mask.sum(), loss.detach()]).tolist()
    count, share = numbers[-2:]
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(columns, numbers, strict=False)
    }
    return {**metrics, "loss": Sum(share)}
