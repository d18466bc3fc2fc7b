"""Global batches of a shard, their metrics, and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_models.errors import NonFiniteGradientError

__all__ = ["SkippedSteps", "global_batches", "on_device", "plain_metric", "row_lengths"]


def global_batches(data: Any, rows_per_batch: int) -> Iterator[Any]:
    """Yield the global batches of a shard, each with its own micro-batch plan."""
    plan = getattr(data, "micro_batch_indices", None)
    count = len(plan) if plan else data.size // rows_per_batch
    if count == 1:
        # Without a copy, the usual case.
        yield data
        return
    for index in range(count):
        yield data.get_batch(index, rows_per_batch)


def row_lengths(batch: Any) -> np.ndarray:
    """Return [rows] the number of tokens of each row."""
    lengths: np.ndarray = batch["input_lengths"].numpy().astype(np.int64)
    return lengths


def on_device(part: Any, device: torch.device) -> Any:
    """Return a micro-batch on the model's device."""
    return part if device.type == "cpu" else part.to(device)


def plain_metric(value: Any) -> Any:
    """Return a metric that can leave the process without torch."""
    return value.item() if isinstance(value, Tensor) else value


class SkippedSteps:
    """Counts optimizer steps in a row whose gradient was inf or nan.

    Args:
        limit: `policy.max_skipped_steps`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def is_finite(self, norm: float) -> bool:
        """Return whether a step with this gradient norm may be taken.

        Raises:
            NonFiniteGradientError: Too many steps in a row must be skipped.
        """
        is_finite = math.isfinite(norm)
        self._in_a_row = 0 if is_finite else self._in_a_row + 1
        if self._in_a_row > self._limit:
            raise NonFiniteGradientError(
                f"the gradient norm was {norm} in {self._in_a_row} optimizer "
                "steps in a row (policy.max_skipped_steps is "
                f"{self._limit}); lower policy.optimizer.kwargs.lr "
                "or look for inf and nan in the loss and its inputs"
            )
        return is_finite
