"""Tiny models of each supported family, built here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

__all__ = ["FAMILIES", "VOCABULARY", "build_family"]

VOCABULARY = 24

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=8, sliding_window=6),
    "gemma": lambda: GemmaConfig(**_SHAPE, head_dim=8),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=6
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=6
    ),
    "mixtral": lambda: MixtralConfig(**_SHAPE, head_dim=8, num_local_experts=4),
    # Its first layer has no experts.
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SHAPE,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
}
"""Model configs by name of the family."""


def build_family(family: str, folder: Path) -> Path:
    """Write a model of a family; every weight is random, biases and norms too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(family))
        model = AutoModelForCausalLM.from_config(
            FAMILIES[family](), dtype=torch.float32
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    # All zeros or ones would hide a missing term.
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
                assert parameter.isfinite().all(), name
        model.save_pretrained(folder)
    return folder
