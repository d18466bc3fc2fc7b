"""Models without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["skeleton"]


def skeleton(build: Callable[[], Any]) -> Any | None:
    """Build a Hugging Face model without memory for its weights.

    Buffers are computed by the model's own initialization, as in `from_pretrained`.

    Args:
        build: Makes the model from its config.

    Returns:
        The model in eval mode; None if its initialization omits a buffer, whose value
        can then only be had by building the whole model.
    """
    with torch.device("meta"):
        model = build()
    buffers = []
    for module in model.modules():
        # Marked as initialized on the meta device, it would be skipped below.
        module.__dict__.pop("_is_hf_initialized", None)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unset(buffer)
                buffers.append((module, name))
    # Parameters have no memory, so no random numbers are drawn for them.
    model.initialize_weights()
    if any(_is_unset(module._buffers[name]) for module, name in buffers):
        return None
    return model.eval()


def _unset(buffer: Tensor) -> Tensor:
    """Return a tensor on the CPU with values that show whether it was written to."""
    value = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return value.fill_(_mark(buffer.dtype))


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(buffer: Tensor | None) -> bool:
    if buffer is None or not buffer.numel():
        return False
    if buffer.dtype.is_floating_point:
        return bool(buffer.isnan().any())
    # A bool has no value to spare for a mark, so it counts as not written.
    return buffer.dtype == torch.bool or bool((buffer == _mark(buffer.dtype)).any())
