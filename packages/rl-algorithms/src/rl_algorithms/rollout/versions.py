"""Staleness: the age of the weights that sampled a row, and rows that are too old."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.rollout.result import Outcome
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
)

__all__ = ["mark_stale", "staleness", "without_stale"]


def staleness(rows: AnyRows, current_version: int) -> Tensor:
    """Return [N], the number of versions since each row's oldest token was sampled."""
    versions: Tensor = rows["weight_version"]
    return current_version - versions


def mark_stale(rows: AnyRows, current_version: int, max_staleness: int) -> Tensor:
    """Mark rows that are too old as stale, and exclude them from training.

    Only rows that could be trained on change. Their rewards are kept.

    Args:
        rows: Columns of `RolloutResult.rows`; `outcome` and `sample_mask` are replaced.
        current_version: Version of the weights about to be trained.
        max_staleness: Maximum number of versions that a row may lag behind.

    Returns:
        [N] bool, whether a row became stale.
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
    """Return the new outcome, the new sample mask and [N] bool, the stale rows.

    Args:
        outcome: [N] of `Outcome`.
        sample_mask: [N].
        age: [N] number of versions that each row lags behind.
        max_staleness: Maximum number of versions that a row may lag behind.
    """
    # Failed rows keep their outcome, which says more than their age.
    old = (age > max_staleness) & (outcome <= int(Outcome.TRUNCATED))
    typed = torch.where(old, int(Outcome.STALE), outcome).to(outcome.dtype)
    return typed, sample_mask.masked_fill(old, 0), old
