"""Metrics of the advantages of a step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["advantage_metrics"]


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Return smallest, mean and largest of the [N] advantages that are trained on."""
    if not len(advantages):
        return {}
    numbers = torch.stack((advantages.min(), advantages.mean(), advantages.max()))
    low, mean, high = numbers.tolist()
    return {
        "advantages/min": low,
        "advantages/mean": mean,
        "advantages/max": high,
    }
