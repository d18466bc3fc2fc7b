"""Masked sums and means that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError

__all__ = ["masked_mean", "masked_sum"]


def masked_sum(
    values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """Sum `values` weighted by `mask`; masked values may even be NaN.

    Raises:
        LossInputError: The mask cannot be broadcast to the values.
    """
    _check_mask(values, mask)
    # A product alone would pass NaN on: NaN * 0 is NaN.
    weighted = torch.where(mask != 0, values * mask, 0.0)
    return weighted.sum() if dim is None else weighted.sum(dim)


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | tuple[int, ...] | None = None,
    global_normalization_factor: Tensor | float | None = None,
) -> Tensor:
    """Average `values` where `mask` is 1.

    Args:
        values: Any shape.
        mask: Broadcastable to `values`; 0/1, or weights.
        dim: Dimensions to reduce; by default all.
        global_normalization_factor: Count to divide by instead of `mask.sum(dim)`: that
            of the whole batch, so that its parts add up.

    Returns:
        The average; exactly 0, with zero gradient, if the count is 0.

    Raises:
        LossInputError: The mask cannot be broadcast to the values.
    """
    total = masked_sum(values, mask, dim)
    if global_normalization_factor is None:
        full = mask.expand_as(values)
        count: Tensor | float = full.sum() if dim is None else full.sum(dim)
    else:
        count = global_normalization_factor
    if isinstance(count, Tensor):
        # Stays on the device: asking whether the count is 0 would make the host wait
        # for it.
        return total / torch.where(count == 0, torch.ones_like(count), count)
    return total / (count if count != 0 else 1.0)


def _check_mask(values: Tensor, mask: Tensor) -> None:
    pairs = zip(reversed(mask.shape), reversed(values.shape), strict=False)
    # Only the mask may be expanded: expanded values would be summed several times.
    if mask.dim() > values.dim() or any(m not in (1, v) for m, v in pairs):
        raise LossInputError(
            f"a mask must have the shape of the values, {list(values.shape)}, or be "
            f"broadcast to it: got {list(mask.shape)}"
        )
