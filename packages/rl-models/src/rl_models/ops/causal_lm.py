"""Load a causal language model the way that training and generation use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.errors import ModelLoadError, UnsupportedModelError
from rl_models.ops.skeleton import skeleton
from rl_models.ops.varlen_attention import ATTENTION_NAME

__all__ = [
    "DTYPES",
    "attention_for",
    "causal_lm_skeleton",
    "load_causal_lm",
    "packing_obstacle",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(
    name_or_path: str | Path,
    precision: str = "float32",
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Load a Hugging Face causal LM with attention that takes packed rows.

    Args:
        name_or_path: A folder or a hub name.
        precision: `float32` or `bfloat16`, the dtype of the weights.
        overrides: Fields of the model's config to replace.

    Returns:
        A `transformers.PreTrainedModel` in eval mode on the CPU.

    Raises:
        ModelLoadError: The folder is missing or incomplete, or the name unknown.
    """
    folder = check_model_folder(name_or_path)
    source = str(folder or name_or_path)
    if folder is None:
        check_hub_name(source)
    disable_progress_bar()  # every worker would draw its own into the same log
    try:
        config = AutoConfig.from_pretrained(source, **dict(overrides or {}))
        return AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=DTYPES[precision],
            attn_implementation=attention_for(config),
        )
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelLoadError(
            f"cannot load the model {source!r} as a causal language model: {error}"
        ) from error


def causal_lm_skeleton(
    source: str, overrides: Mapping[str, Any] | None = None
) -> Any | None:
    """Build the model of `load_causal_lm` in float32 without memory for its weights.

    Args:
        source: A folder or a hub name that was checked.
        overrides: Fields of the model's config to replace.

    Returns:
        As `skeleton`.
    """
    # Float32 as for a model that is loaded: `skeleton` gives shapes, names and buffers,
    # and the weights are loaded into it in parts.
    config = AutoConfig.from_pretrained(source, **dict(overrides or {}))
    model = skeleton(
        lambda: AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPES["float32"],
            attn_implementation=attention_for(config),
        )
    )
    if model is not None:
        with suppress(OSError):  # then the one derived from its config stays
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def attention_for(config: Any) -> str | None:
    """Return `rl_varlen` if the architecture supports it, else one that is correct."""
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise UnsupportedModelError(
            f"{type(config).__name__} has no causal language model in transformers"
        ) from error
    # Layers that cannot use torch's attention have what neither that nor ours computes,
    # such as the sinks of GptOss; both would leave it out without a word.
    needed = ("_supports_attention_backend", "_supports_sdpa")
    if not all(getattr(model_class, ability, False) for ability in needed):
        return None  # transformers' default for it
    if torch.cuda.is_available() and is_flash_attn_2_available():
        return "flash_attention_2"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        # torch's own attention, which is transformers' default, silently ignores the
        # cap.
        return "eager"
    return ATTENTION_NAME


def packing_obstacle(model: Any) -> str | None:
    """Return why the model cannot take packed sequences; None if it can."""
    config = model.config
    attention = config._attn_implementation
    if attention not in (ATTENTION_NAME, "flash_attention_2"):
        return f"its attention implementation is {attention!r}"
    # These carry a state from token to token, also across the border of two sequences.
    mixers = {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}
    found = mixers.intersection(getattr(config, "layer_types", None) or [])
    if found:
        return f"it has layers of type {', '.join(sorted(found))}"
    if not hasattr(config, "num_attention_heads"):
        return "it has no attention heads"
    return None
