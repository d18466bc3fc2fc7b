"""Normalization to mean 0 and standard deviation 1 over a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["whiten"]

_RESOLUTION = 1e-6
"""Relative standard deviation below which differences are rounding of float32."""


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """Shift and scale to a weighted mean of 0 and a weighted variance of 1.

    The variance divides by N - 1, with N the sum of the weights, as for a group of
    rewards (`baselines`). Values that all agree become 0, as does everything if all
    weights are 0.

    Args:
        values: Any shape; values of weight 0 may even be NaN.
        weights: Number of times that each value counts, in the same shape.

    Returns:
        Normalized values in the shape and dtype of `values`, 0 where the weight is 0;
        computed in float64.
    """
    counts, weights = weights != 0, weights.to(torch.float64)
    counted = torch.where(counts, values.to(torch.float64), 0.0)
    total = weights.sum()
    mean = (counted * weights).sum() / total.clamp(min=1)
    # Values of weight 0 were replaced by 0, and would deviate by the whole mean.
    deviation = torch.where(counts, counted - mean, 0.0)
    # Deviations, not the mean of squares minus the squared mean, which cancels for
    # large means.
    variance = (deviation.square() * weights).sum() / (total - 1).clamp(min=1)
    std = variance.sqrt()
    # amax of nothing raises, and an empty batch has nothing to whiten.
    floor = _RESOLUTION * counted.abs().amax() if counted.numel() else std
    whitened = torch.where(std > floor, deviation / std, torch.zeros_like(deviation))
    return whitened.to(values.dtype)
