"""The precision in which a trainer hands out its weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rounded", "rounding_dtype"]


def rounding_dtype(computed: str, sent: str) -> torch.dtype | None:
    """Return the data type that weights are rounded to; None: they stay as they are.

    Args:
        computed: Precision that the trainer computes with, `policy.precision`.
        sent: Precision that the weights are cast to afterwards.
    """
    # A generator in float32 would otherwise sample with bits that a trainer in bfloat16
    # rounds away in its own forward pass.
    if computed in ("float32", sent):
        return None
    dtype: torch.dtype = getattr(torch, computed)
    return dtype


def rounded(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Round a tensor of floating-point numbers; None leaves it as it is."""
    return value.to(dtype) if dtype and value.is_floating_point() else value
