"""Choose the fastest way to load and run a model.

| decoder | for | cache |
|---|---|---|
| `FusedDecoder` | Llama, Mistral, Qwen2, Qwen3 | `KVBuffers` |
| `ModuleDecoder` | other models whose attention takes packed rows | `KVBuffers` |
| `OwnCacheDecoder` | state-space and hybrid models, and the rest | the model's own |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_models.checkpoint.context_length import context_length
from rl_models.generation.huggingface.decoder import Decoder
from rl_models.generation.huggingface.fused_decoder import FusedDecoder
from rl_models.generation.huggingface.plain_weights import load_plain_model

__all__ = ["LoadedModel", "load_for_sampling"]


@dataclass(frozen=True)
class LoadedModel:
    """A model and its decoder."""

    model: torch.nn.Module
    """Holds the weights."""
    decoder: Decoder
    generation_config: Any
    """Has an attribute `eos_token_id`, the saved end of a text."""
    context_length: int | None
    """Longest sequence; None if not known."""


def load_for_sampling(
    model_name: str,
    precision: str,
    overrides: Mapping[str, Any] | None,
    device: torch.device,
    *,
    fused: bool = True,
) -> LoadedModel:
    """Load a model, and choose its decoder.

    Args:
        model_name: Folder or hub name.
        precision: `float32` or `bfloat16`, the dtype of the weights.
        overrides: Fields of the model's `config.json` to replace.
        device: Device to run on.
        fused: Whether the fused decoder may be chosen.

    Raises:
        ModelLoadError: The model is missing or incomplete.
    """
    plain = None
    if fused and precision == "float32":
        plain = load_plain_model(model_name, overrides)
    if plain is not None:
        plain.eval().requires_grad_(False).to(device)
        config = plain.config
        return LoadedModel(plain, FusedDecoder(plain), config, config.context_length)
    # Imported only if needed: transformers' model code takes seconds.
    from rl_models.generation.huggingface.decoders import build_decoder  # noqa: PLC0415
    from rl_models.ops.causal_lm import load_causal_lm  # noqa: PLC0415

    model = load_causal_lm(model_name, precision, overrides)
    model.eval().requires_grad_(False).to(device)
    may_fuse = fused and FusedDecoder.supports(model)
    decoder = FusedDecoder(model) if may_fuse else build_decoder(model)
    length = context_length(model.config)
    return LoadedModel(model, decoder, model.generation_config, length)
