"""Adapters in the arguments of an engine: checks, and the arguments themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.errors import ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.lora_config import LoRAConfig

__all__ = ["SCALE", "adapter_args", "check_adapter"]

SCALE = "rl_adapter_scale"
"""Key of vLLM's `additional_config` by which its workers learn the scale."""

# Ranks that vLLM can allocate buffers for; others are padded with zeros to the next.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Dense decoders whose linear layers are exactly `_LAYERS`.
_FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_LAYERS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
_REMEDY = "or set policy.lora.sync to merged"


def check_adapter(
    config: GenerationConfig,
    lora: LoRAConfig,
    model_config: Mapping[str, Any],
    *,
    on_gpu: bool,
) -> None:
    """Refuse adapters that vLLM cannot compute with, before a process is started.

    Args:
        config: The generation config.
        lora: The adapters.
        model_config: The model's `config.json`; empty where it is not known.
        on_gpu: Whether the engine runs on GPUs.

    Raises:
        ConfigError: A rank, a family of models or a data type that it does not take.
    """
    case = "with policy.lora.sync 'adapter' and the generation backend vllm"
    if lora.r > _RANKS[-1]:
        raise ConfigError(
            f"policy.lora.r must be at most {_RANKS[-1]} {case}: got {lora.r}; use "
            f"{_RANKS[-1]}, {_REMEDY}"
        )
    family = model_config.get("model_type")
    if family is not None and family not in _FAMILIES:
        raise ConfigError(
            f"policy.model_name must be of one of the families {', '.join(_FAMILIES)} "
            f"{case}: got {family!r}; use such a model, {_REMEDY}"
        )
    if on_gpu and config.precision == "float32":
        raise ConfigError(
            f"policy.generation.precision must be bfloat16 {case} on GPUs, whose "
            f"kernels for adapters take no other: got float32; use bfloat16, {_REMEDY}"
        )


def adapter_args(lora: LoRAConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM's `EngineArgs` for one adapter that is sent.

    Args:
        lora: The adapter.
        given: Further arguments of the engine, as the config has them.
    """
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in _RANKS if rank >= lora.r),
        # Named, because by default vLLM adapts the embeddings too.
        "lora_target_modules": lora.target_modules or _LAYERS,
        # vLLM hands it on to its workers unread, also to those in another process.
        "additional_config": {
            **(given.get("additional_config") or {}),
            SCALE: lora.scale,
        },
    }
