"""Metrics of the advantages of a step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["advantage_metrics"]


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Return minimum, mean and maximum of the [N] advantages of trained rows."""
    if not len(advantages):
        return {}
    # Stacked, so that a device is synchronized once and not three times.
    numbers = torch.stack((advantages.min(), advantages.mean(), advantages.max()))
    low, mean, high = numbers.tolist()
    return {
        "advantages/min": low,
        "advantages/mean": mean,
        "advantages/max": high,
    }
