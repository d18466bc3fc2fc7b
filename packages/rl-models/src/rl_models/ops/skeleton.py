"""Models without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["skeleton"]


def skeleton(build: Callable[[], Any]) -> Any | None:
    """Build a Hugging Face model without memory for its weights.

    Buffers are computed by the model's own initialization, as `from_pretrained` has
    them computed.

    Args:
        build: Makes the model from its config.

    Returns:
        The model in eval mode; None if its initialization leaves out a buffer, so that
        only making it whole gives its value.
    """
    with torch.device("meta"):
        model = build()
    buffers = []
    for module in model.modules():
        # What follows must initialize it again.
        module.__dict__.pop("_is_hf_initialized", None)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unset(buffer)
                buffers.append((module, name))
    # Parameters have no memory, so that nothing is drawn for them.
    model.initialize_weights()
    if any(_is_unset(module._buffers[name]) for module, name in buffers):
        return None
    return model.eval()


def _unset(buffer: Tensor) -> Tensor:
    """Return a tensor on the CPU that tells whether somebody wrote to it."""
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
    # A flag has no third value: it cannot be told whether it was set.
    return buffer.dtype == torch.bool or bool((buffer == _mark(buffer.dtype)).any())
