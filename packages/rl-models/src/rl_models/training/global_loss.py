"""The loss of a global batch on one rank, and the metrics of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_models.interfaces import LossFunction
from rl_models.training.global_batch import num_trained, on_device
from rl_models.types import TrainingRows

__all__ = ["GlobalLoss", "Metrics", "add_metrics"]

Metrics = dict[str, list[Any]]
"""Metrics of micro-batches by name."""


class GlobalLoss:
    """Adds up the shares of micro-batches in the loss of a global batch.

    Args:
        loss_fn: The algorithm's loss.
        batch: This rank's rows of the global batch.
        device: Where the loss is computed.
        over_ranks: Adds up a small tensor over the ranks with different rows, in place.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: TrainingRows,
        device: torch.device,
        over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._loss_fn = loss_fn
        self._over_ranks = over_ranks
        counts = over_ranks(num_trained(batch).to(device)).float()
        self._num_rows = counts[0]
        self.num_tokens = counts[1]
        """Trained tokens of the global batch, over all ranks."""
        # In float64, so that the sizes of micro-batches hardly change the sum.
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of this rank's shares."""
        self.metrics: Metrics = {}

    def share(
        self, part: TrainingRows, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss of a micro-batch and its metrics, which `add` takes.

        Args:
            part: The micro-batch.
            inputs: Outputs of the model by name; see `LossFunction`.
        """
        part = on_device(part, self.total.device)
        return self._loss_fn(part, self._num_rows, self.num_tokens, **inputs)

    def add(self, loss: Tensor, metrics: Mapping[str, Any]) -> None:
        """Add the share of a micro-batch."""
        # Detached: with its graph, the loss would keep all activations alive.
        self.total.add_(loss.detach().double())
        add_metrics(self.metrics, metrics)

    def over_ranks(self) -> float:
        """Return the loss of the global batch; collective on all ranks."""
        return float(self._over_ranks(self.total).item())


def add_metrics(known: Metrics, found: Mapping[str, Any]) -> None:
    """Add a micro-batch's metrics, as values that leave the process without torch."""
    for name, value in found.items():
        plain = value.item() if isinstance(value, Tensor) else value
        known.setdefault(name, []).append(plain)
