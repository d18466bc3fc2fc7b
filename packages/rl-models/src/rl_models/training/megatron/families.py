"""The models that `megatron` trains; needs no Megatron-core.

A model for which Megatron-core would compute something else is refused.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from rl_distributed.errors import ConfigError
from rl_models.checkpoint.context_length import context_length
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError, UnsupportedModelError

__all__ = ["FAMILIES", "check_layout", "model_config"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` in a model's config."""


def model_config(config: PolicyConfig) -> Any:
    """Return the Hugging Face config of a policy's model.

    Raises:
        ConfigError: `max_total_sequence_length` exceeds the model's context.
        ModelLoadError: The folder is missing or incomplete, or the name unknown.
        UnsupportedModelError: Megatron-core would compute something else.
    """
    source = config.model_name
    try:
        found = AutoConfig.from_pretrained(source, **config.hf_config_overrides)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"cannot load the config of the model {source!r}: {error}"
        ) from error
    limit = context_length(found)
    _check_architecture(found, min(config.row_limit, limit or config.row_limit))
    if limit is not None and (config.max_total_sequence_length or 0) > limit:
        raise ConfigError(
            "policy.max_total_sequence_length must not exceed the context of "
            f"{source}: got {config.max_total_sequence_length} with a context of "
            f"{limit}; use at most {limit}"
        )
    return found


def check_layout(config: PolicyConfig, model: Any) -> None:
    """Refuse a layout of the ranks that this backend does not have for a model.

    Args:
        config: The policy's config.
        model: The Hugging Face config.

    Raises:
        ConfigError: A setting, with a remedy.
    """
    layout, parts = config.parallelism, config.megatron.virtual_stages
    if parts > 1 and layout.pipeline == 1:
        raise ConfigError(
            "policy.megatron.virtual_stages must be 1 without pipeline stages: got "
            f"{parts}; set policy.parallelism.pipeline to 2 or more"
        )
    layers = int(model.num_hidden_layers)
    if layers % (layout.pipeline * parts):
        raise ConfigError(
            "policy.megatron.virtual_stages x policy.parallelism.pipeline must divide "
            f"the {layers} layers of {config.model_name}: got {parts} x "
            f"{layout.pipeline}; set virtual_stages to 1"
        )
    if not getattr(model, "num_experts", 0):
        return
    if layout.expert > 1 and parts > 1:
        raise ConfigError(
            "policy.megatron.virtual_stages must be 1 with policy.parallelism.expert "
            f"{layout.expert}: got {parts}; set one of them to 1"
        )
    if layout.tensor > 1 and not layout.sequence:
        raise ConfigError(
            "policy.parallelism.sequence must be true with policy.parallelism.tensor "
            f"{layout.tensor} for the experts of {config.model_name} in the training "
            "backend 'megatron', whose tensor ranks route tokens of their own: got "
            "false"
        )


def _check_architecture(config: Any, longest_row: int) -> None:
    """Refuse a model for which Megatron-core would compute something else."""
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"the training backend 'megatron' has {', '.join(FAMILIES)}: got a model "
            f"of type {family!r}; use policy.backend=dtensor"
        )
    rope = config.rope_parameters
    obstacles = {
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        f"rope type {rope.get('rope_type')!r}": rope.get("rope_type") != "default",
        "attention_bias": family != "qwen2" and getattr(config, "attention_bias", 0),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
        "a sliding window": _slides(config, longest_row),
    }
    found = [name for name, is_there in obstacles.items() if is_there]
    if found:
        raise UnsupportedModelError(
            f"the training backend 'megatron' cannot train a {family} model with "
            f"{', '.join(found)}; use policy.backend=dtensor"
        )


def _slides(config: Any, longest_row: int) -> bool:
    """Return whether some token does not see all tokens before it."""
    # A window that no row exceeds changes nothing, and Mistral's config has one.
    window = getattr(config, "sliding_window", None)
    if window is None or window >= longest_row:
        return False
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds
