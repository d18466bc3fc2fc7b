"""The reward model's loss: Bradley-Terry likelihood of the preferred answers.

Shapes: B pairs are 2 B rows, chosen and rejected alternating; S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.columns import LossColumns, LossRows
from rl_algorithms.losses.options import read_options
from rl_algorithms.losses.preference_config import PreferenceLossConfig
from rl_algorithms.losses.reductions import masked_mean
from rl_distributed.metrics.values import Mean, MetricValue, Sum
from rl_models.types import LossInputType, LossType

__all__ = ["PreferenceLossDataDict", "PreferenceLossFn"]

_NAME = "PreferenceLossFn"


class PreferenceLossDataDict(TypedDict):
    """Columns of `PreferenceLossFn`."""

    value_mask: Annotated[
        Tensor, "[2 B, S]; set it to 1 at each row's last token, 0 elsewhere"
    ]
    sample_mask: Annotated[
        Tensor, "[2 B]; set it to 1 for rows that count, as torch.ones(2 * B)"
    ]


_COLUMNS = LossColumns(PreferenceLossDataDict, _NAME)


class PreferenceLossFn:
    r"""The Bradley-Terry loss over interleaved pairs (Ouyang et al., arXiv:2203.02155).

    With $r(w)$ and $r(l)$ the rewards of the chosen and the rejected answer, $m$ the
    margin (Touvron et al., arXiv:2307.09288) and $c$ the weight that centers rewards
    (Eisenstein et al., arXiv:2312.09244), the loss of a pair is

    $$
    -\log \operatorname{sigmoid}(r(w) - r(l) - m) + c \left( r(w) + r(l) \right)^2
    $$

    averaged over the pairs of the global batch.

    Columns of the batch: `value_mask` [2 B, S], 1 at each row's last token, and
    `sample_mask` [2 B]; a pair counts if both of its rows do.

    Args:
        config: The options, or a mapping of them, which is validated.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.VALUE
    rows_per_group = 2
    """Number of consecutive rows kept together: both rows of a pair."""

    def __init__(
        self, config: PreferenceLossConfig | Mapping[str, Any] | None = None
    ) -> None:
        self.config = read_options(PreferenceLossConfig, config, "PreferenceLossFn")

    def __call__(
        self,
        data: LossRows[PreferenceLossDataDict],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        """Return this micro-batch's share of the loss, and its metrics.

        Args:
            data: The columns described in the class.
            global_valid_seqs: Number of valid rows in the global batch, two per pair.
            global_valid_toks: Not used.
            inputs: `values` [2 B, S].
        """
        values = _values(inputs)
        rows = _COLUMNS.read(data)
        rewards = _rewards(rows, values)
        sample_mask = rows["sample_mask"].to(rewards.dtype)
        counts = torch.minimum(sample_mask[0::2], sample_mask[1::2])
        # A pair with one invalid row is dropped whole: there is nothing to compare
        # with.
        both = counts.repeat_interleave(2)
        rewards = rewards.masked_fill(both == 0, 0.0)
        chosen, rejected = rewards[0::2], rewards[1::2]
        per_pair = -logsigmoid(chosen - rejected - self.config.margin)
        if self.config.center_rewards_coef:
            centre = (chosen + rejected).square()
            per_pair = per_pair + self.config.center_rewards_coef * centre
        loss = masked_mean(
            per_pair, counts, global_normalization_factor=global_valid_seqs / 2
        )
        with torch.no_grad():
            return loss, _metrics(loss, chosen, rejected, counts)


def _values(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return [2 B, S], the values of pairs."""
    values = inputs.get("values")
    if values is None:
        raise LossInputError(
            f"{_NAME} is computed from values: got "
            f"{', '.join(sorted(inputs)) or 'nothing'}; call it with values=[2 B, S]"
        )
    # An odd number means that a micro-batch has split a pair, and all later rows would
    # be compared with the wrong answer.
    if len(values) % 2:
        raise LossInputError(
            f"{_NAME} takes rows in pairs, chosen and rejected alternating: got "
            f"{len(values)} rows"
        )
    return values


def _rewards(rows: PreferenceLossDataDict, values: Tensor) -> Tensor:
    """Return [2 B], the value at the last token of each row."""
    last = rows["value_mask"]
    if last.shape != values.shape:
        raise LossInputError(
            f"column 'value_mask' must be [2 B, S] = {list(values.shape)}: got "
            f"{list(last.shape)}"
        )
    # `where` and not a product: values of padding may be NaN, and NaN * 0 is NaN.
    return torch.where(last != 0, values, 0.0).sum(-1)


def _metrics(
    loss: Tensor, chosen: Tensor, rejected: Tensor, counts: Tensor
) -> dict[str, MetricValue]:
    columns = {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "rewards_chosen_mean": chosen,
        "rewards_rejected_mean": rejected,
        "rewards_margin_mean": chosen - rejected,
    }
    sums = (torch.stack(list(columns.values())) * counts).sum(-1)
    # One transfer to the host for all numbers.
    numbers = torch.cat((sums, torch.stack((counts.sum(), loss.detach())))).tolist()
    count, share = numbers[-2:]
    metrics: dict[str, MetricValue] = {
        name: Mean(total, count) for name, total in zip(columns, numbers, strict=False)
    }
    return {**metrics, "loss": Sum(share), "num_valid_samples": Sum(count)}
