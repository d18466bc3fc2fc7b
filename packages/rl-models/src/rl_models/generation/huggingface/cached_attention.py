"""Attention `rl_cached` and a cache for sampling with transformers' models.

Packed prompts go to `rl_varlen`. A decoding step reads the buffers of the cache that
the engine activated for the running forward pass: they know the columns and rows that
count, so that no mask has to be built in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import sdpa_mask

from rl_models.generation.huggingface.kv_cache import KVBuffers
from rl_models.ops.varlen_attention import varlen_attention_forward

__all__ = ["CACHED_ATTENTION_NAME", "DecodingCache", "decoding_from"]

IntArray = npt.NDArray[np.int64]

CACHED_ATTENTION_NAME = "rl_cached"

# A context variable, because transformers passes no argument of ours to attention.
_active: ContextVar[KVBuffers | None] = ContextVar("rl_cached_buffers", default=None)


@contextmanager
def decoding_from(buffers: KVBuffers) -> Iterator[None]:
    """Make forward passes decoding steps over these buffers."""
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
    """Compute one layer's attention, [1, H, T, D] or [B, H, 1, D] to [.., .., H, D]."""
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


class DecodingCache(Cache):  # type: ignore[misc]
    """Shows `KVBuffers` to a model of transformers.

    A packed prefill is copied into the buffers and attended to as it is; in a decoding
    step the new column is written, and the attention function of this backend reads
    the buffers itself.
    """

    def __init__(self, buffers: KVBuffers) -> None:
        super().__init__(layers=[])
        self.buffers = buffers
        self._prompts: tuple[int, IntArray] | None = None
        self._num_heads = 0

    def begin_prompts(
        self, first_row: int, first_token_B: IntArray, num_heads: int
    ) -> None:
        """Make the next forward pass a packed prefill of these rows."""
        self._prompts = (first_row, first_token_B)
        self._num_heads = num_heads

    def begin_step(self) -> None:
        """Make the next forward pass feed one new token per row."""
        self._prompts = None
        self.buffers.begin_step()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values of one layer, [1, K, T, D] or [B, K, 1, D]."""
        # They are returned unchanged: a prefill attends to them as they are, and a step
        # ignores them and reads the buffers.
        if self._prompts is None:
            self.buffers.append(layer_idx, key_states[:, :, 0], value_states[:, :, 0])
        else:
            keys, values = (
                key_states[0].transpose(0, 1),
                value_states[0].transpose(0, 1),
            )
            self.buffers.place_prompts(
                layer_idx, keys, values, *self._prompts, self._num_heads
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns filled before the running step."""
        return max(0, self.buffers.end - 1) if self._prompts is None else 0


AttentionInterface.register(CACHED_ATTENTION_NAME, cached_attention_forward)
AttentionMaskInterface.register(CACHED_ATTENTION_NAME, sdpa_mask)
