"""How old the weights are that sampled a row, and rows that are too old to train on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_algorithms.rollout.result import Outcome
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["mark_stale", "staleness", "without_stale"]


def staleness(rows: BatchedDataDict[Any], current_version: int) -> Tensor:
    """Return [N] how many versions ago the oldest token of each row was sampled."""
    versions: Tensor = rows["weight_version"]
    return current_version - versions


def mark_stale(
    rows: BatchedDataDict[Any], current_version: int, max_staleness: int
) -> Tensor:
    """Type rows that are too old as stale, and take them out of training.

    Only rows that could be trained on change; their rewards stay readable.

    Args:
        rows: Columns of `RolloutResult.rows`; `outcome` and `sample_mask` are replaced.
        current_version: Version of the weights that are about to be trained.
        max_staleness: Versions that a row may lie behind.

    Returns:
        [N] booleans: which rows became stale.
    """
    rows["outcome"], rows["sample_mask"], old = without_stale(
        rows["outcome"],
        rows["sample_mask"],
        staleness(rows, current_version),
        max_staleness,
    )
    return old


def without_stale(
    outcome: Tensor, sample_mask: Tensor, age: Tensor, max_staleness: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outcome and sample mask, with rows that are too old as stale, and these.

    Args:
        outcome: [N] of `Outcome`.
        sample_mask: [N].
        age: [N] versions that each row lies behind.
        max_staleness: Versions that a row may lie behind.
    """
    # Rows that failed keep that outcome: it says more than their age.
    old = (age > max_staleness) & (outcome <= int(Outcome.TRUNCATED))
    typed = torch.where(old, int(Outcome.STALE), outcome).to(outcome.dtype)
    return typed, sample_mask.masked_fill(old, 0), old
