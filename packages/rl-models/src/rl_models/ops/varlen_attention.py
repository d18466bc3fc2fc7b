"""Packed attention as the implementation `rl_varlen` of transformers' models.

A call without the borders of packed sequences is transformers' `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_models.errors import UnsupportedModelError
from rl_models.ops.packed_attention import ATTENTION_NAME, packed_attention

__all__ = ["ATTENTION_NAME", "varlen_attention_forward"]


def varlen_attention_forward(  # noqa: PLR0917 - the signature is transformers'
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; see the module's docstring.

    Args:
        module: The attention layer.
        query: [1, H, T, D] when packed.
        key: [1, H_kv, T, D] when packed.
        value: [1, H_kv, T, D_v] when packed.
        attention_mask: Ignored when packed.
        dropout: Probability to drop an attention weight.
        scaling: Factor of the scores; default `D ** -0.5`.
        is_causal: Overrides the layer's own flag.
        cu_seq_lens_q: [n + 1] borders; None means that the call is not packed.
        sliding_window: Number of tokens that a token sees, itself included.
        kwargs: Further arguments that the model passes on.

    Returns:
        [1, T, H, D_v], and None for the weights.
    """
    if cu_seq_lens_q is None:
        # A sliding window is part of the mask here, which transformers has made.
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return output
    _refuse_what_cannot_be_packed(module, query, is_causal, kwargs)
    attended = packed_attention(
        query,
        key,
        value,
        cu_seq_lens_q,
        dropout=dropout,
        scaling=scaling,
        sliding_window=sliding_window,
    )
    return attended, None


def _refuse_what_cannot_be_packed(
    module: torch.nn.Module,
    query: Tensor,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> None:
    # Borders count the tokens of a single row: others would not be attended to.
    if query.shape[0] != 1:
        raise UnsupportedModelError(
            "a packed call must have one row of tokens ([1, T]): got "
            f"{query.shape[0]} rows together with cu_seq_lens"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # Torch's attention has none of these, and leaving them out would give other logits
    # without an error.
    features = ["softcap", "s_aux", "position_bias"]
    used = [name for name in features if extra.get(name) is not None]
    if not causal or used:
        what = ", ".join(used) or "attention that is not causal"
        raise UnsupportedModelError(
            f"{type(module).__name__} uses {what}, which packed rows do not support; "
            "switch policy.sequence_packing off"
        )


AttentionInterface.register(ATTENTION_NAME, varlen_attention_forward)
# For calls that are not packed. A name without an entry would get no mask at all.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
