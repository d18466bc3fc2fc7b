"""Log-probs of single rows, which a loss returns beside its metrics.

A run keeps some answers as readable records. What the policy thinks of their tokens is
known in the loss, which computes it anyway, but only sums of it are metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NotRequired

from torch import Tensor

from rl_algorithms.losses.columns import TokenMasks
from rl_distributed.metrics.values import MetricValue

__all__ = [
    "KEPT_LOGPROBS",
    "KEPT_ROW",
    "KeptRows",
    "RowLogprobs",
    "kept_logprobs",
]

KEPT_ROW: Final = "kept_row"
"""Column [R] with a number of each kept row that is its own, and -1 for the others."""
KEPT_LOGPROBS = "kept_logprobs"
"""Name under which they are among the metrics of a loss."""


@dataclass(frozen=True, slots=True)
class RowLogprobs(MetricValue):
    """Log-probs of the sampled tokens of some rows, which no sink shows as a number."""

    values: Mapping[int, Sequence[float]]
    """One list per row, by the number in column `kept_row`."""

    def merge(self, other: RowLogprobs) -> RowLogprobs:
        """Join the rows of both; of a row in several passes, the first one counts."""
        return RowLogprobs({**other.values, **self.values})

    def __float__(self) -> float:
        return math.nan

    @property
    def is_empty(self) -> bool:
        """True, as there is no single number to show."""
        return True


class KeptRows(TokenMasks):
    """Columns of `kept_logprobs`."""

    kept_row: NotRequired[Annotated[Tensor, "[B]; see `KEPT_ROW`"]]


def kept_logprobs(data: KeptRows, logprobs: Tensor) -> dict[str, MetricValue]:
    """Return the log-probs of the kept rows of a micro-batch, or nothing.

    Args:
        data: Column `token_mask` [B, S], and `kept_row` [B] if rows are kept.
        logprobs: [B, S - 1], of the tokens after the first one.
    """
    if KEPT_ROW not in data:
        return {}
    numbers = data[KEPT_ROW].tolist()
    kept = {n: row for row, n in enumerate(numbers) if n >= 0}
    if not kept:
        return {}
    found, masks = logprobs.detach().float(), data["token_mask"][:, 1:] != 0
    values = {n: found[row][masks[row]].tolist() for n, row in kept.items()}
    return {KEPT_LOGPROBS: RowLogprobs(values)}
