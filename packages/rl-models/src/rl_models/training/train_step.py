"""One training step of a rank: global batch by global batch, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.training.global_batch import global_batches
from rl_models.training.global_loss import Metrics

__all__ = ["train_global_batches"]

T = TypeVar("T")


def train_global_batches(
    data: BatchedDataDict[T],
    rows_per_batch: int,
    optimizer: Optimizer,
    accumulate: Callable[[BatchedDataDict[T]], tuple[float, Metrics]],
    update: Callable[[], tuple[float, Metrics]] | None,
) -> tuple[dict[str, Any], Metrics]:
    """Accumulate gradients and take a step, for each global batch of a shard.

    Args:
        data: Rows of this rank.
        rows_per_batch: Rows of a global batch on this rank.
        optimizer: Its learning rate is reported.
        accumulate: Adds up the gradients of a global batch; returns its loss and
            metrics.
        update: Takes the step; returns the norm of the gradients and metrics. None
            where the loss is only measured.

    Returns:
        `loss`, `grad_norm` and `lr` per global batch; and the metrics of all of them.
    """
    losses, norms, rates = [], [], []
    metrics: Metrics = {}
    for batch in global_batches(data, rows_per_batch):
        # Before the update, whose schedule sets the rate of the next step.
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss, found = accumulate(batch)
        norm, of_step = (0.0, {}) if update is None else update()
        losses.append(loss)
        norms.append(norm)
        for name, values in (*found.items(), *of_step.items()):
            metrics.setdefault(name, []).extend(values)
    result = {
        "loss": torch.tensor(losses, dtype=torch.float32),
        "grad_norm": torch.tensor(norms, dtype=torch.float32),
        "lr": torch.tensor(rates, dtype=torch.float64),
    }
    return result, metrics
