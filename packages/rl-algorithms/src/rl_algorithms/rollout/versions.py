"""How old the weights are that sampled a row, and rows that are too old to train on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_algorithms.rollout.result import Outcome
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["mark_stale", "staleness"]


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
    outcome = rows["outcome"]
    old = staleness(rows, current_version) > max_staleness
    old &= outcome <= int(Outcome.TRUNCATED)
    rows["outcome"] = torch.where(old, int(Outcome.STALE), outcome).to(outcome.dtype)
    rows["sample_mask"] = rows["sample_mask"].masked_fill(old, 0)
    return old
