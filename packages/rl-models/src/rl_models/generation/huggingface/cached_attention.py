"""The attention implementation `rl_cached` of transformers' models while they sample.

Packed prompts go to `rl_varlen`. A decoding step reads the buffers of the cache that
the engine activated for the running forward pass: they know which columns and rows
count, so that no mask has to be built in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from rl_models.generation.huggingface.kv_cache import KVBuffers
from rl_models.ops.varlen_attention import varlen_attention_forward

__all__ = ["CACHED_ATTENTION_NAME", "decoding_from"]

CACHED_ATTENTION_NAME = "rl_cached"

_active: ContextVar[KVBuffers | None] = ContextVar("rl_cached_buffers", default=None)


@contextmanager
def decoding_from(buffers: KVBuffers) -> Iterator[None]:
    """Forward passes inside are decoding steps over these buffers."""
    token = _active.set(buffers)
    try:
        yield
    finally:
        _active.reset(token)


def cached_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, [1, H, T, D] or [B, H, 1, D] to [.., .., H, D]."""
    buffers = _active.get()
    if buffers is None:
        output: tuple[torch.Tensor, None] = varlen_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
        return output
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attended = buffers.attend(layer, query[:, :, 0], scale, sliding_window)
    return attended[:, None], None


AttentionInterface.register(CACHED_ATTENTION_NAME, cached_attention_forward)
AttentionMaskInterface.register(CACHED_ATTENTION_NAME, sdpa_mask)
