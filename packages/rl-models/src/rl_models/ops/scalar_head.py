"""Models with one number per token: critics and reward models.

The number at position i is the head's output for the hidden state after tokens 0 to i.
`value` is transformers' token classification with one label, a number for every token;
`reward` is its sequence classification, whose number is that of the last token. Both
compute the same here; they differ in the class under which a model is saved.

Letters in shapes: N positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import logging as transformers_logging

from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.errors import ModelLoadError, UnsupportedModelError
from rl_models.ops.causal_lm import DTYPES, attention_for
from rl_models.ops.skeleton import skeleton

__all__ = [
    "SCALAR_HEADS",
    "load_scalar_model",
    "scalar_head_name",
    "scalar_model_skeleton",
]

SCALAR_HEADS: dict[str, Any] = {
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
"""transformers' class for each head."""

_HEAD_NAMES = ("score", "classifier")


def load_scalar_model(
    name_or_path: str | Path,
    head: Literal["value", "reward"],
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """Load a float32 model with a scalar head, from a causal LM or from such a model.

    Parts of the head that the folder lacks are drawn with the seed: weights from a
    normal distribution of standard deviation 1 / (H + 1), a bias of 0. The first
    outputs are small then.

    Args:
        name_or_path: A folder or a hub name.
        head: `value` or `reward`.
        overrides: Fields of the model's config to replace.
        seed: Seed of a new head.

    Returns:
        A `transformers.PreTrainedModel` in eval mode on the CPU, whose `forward` takes
        `positions` [N] (indices into the flattened tokens) and returns [N] float32.

    Raises:
        ModelLoadError: The folder is missing or incomplete, or the name unknown.
        UnsupportedModelError: The architecture has no such head in transformers.
    """
    folder = check_model_folder(name_or_path)
    source = str(folder or name_or_path)
    if folder is None:
        check_hub_name(source)
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    # transformers would warn that the head is missing and the language-model head
    # unexpected; what matters of it is checked below.
    transformers_logging.set_verbosity_error()
    try:
        config = _config(source, head, overrides)
        model, info = SCALAR_HEADS[head].from_pretrained(
            source,
            config=config,
            dtype=DTYPES["float32"],
            attn_implementation=attention_for(config),
            output_loading_info=True,
        )
    # A head with several labels is a RuntimeError: its shape is not that of one.
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"cannot load the model {source!r} with head {head!r}: {error}; give a "
            "causal language model, or a folder saved with such a head of one label"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    name = scalar_head_name(model)
    lacking = [key for key in info["missing_keys"] if not key.startswith(f"{name}.")]
    if lacking:
        raise ModelLoadError(
            f"the model folder {source!r} lacks weights such as {sorted(lacking)[0]}; "
            "only the head may be new"
        )
    _draw_head(getattr(model, name), name, info["missing_keys"], seed)
    # transformers' own forward finds the last token by the padding id, which packed
    # rows do not have, and returns no number for chosen positions.
    model.forward = MethodType(_score, model)
    return model


def scalar_model_skeleton(
    source: str,
    head: Literal["value", "reward"],
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Any | None:
    """Build the model of `load_scalar_model` without memory for its weights.

    The head alone has memory, and is drawn like a new one.

    Args:
        source: A folder or a hub name that was checked.
        head: `value` or `reward`.
        overrides: Fields of the model's config to replace.
        seed: Seed of a new head.

    Returns:
        As `skeleton`.
    """
    config = _config(source, head, overrides)
    model = skeleton(
        lambda: SCALAR_HEADS[head].from_config(
            config,
            dtype=DTYPES["float32"],
            attn_implementation=attention_for(config),
        )
    )
    if model is None:
        return None
    name = scalar_head_name(model)
    layer = getattr(model, name).to_empty(device="cpu")
    names = {f"{name}.{part}" for part, _ in layer.named_parameters()}
    _draw_head(layer, name, names, seed)
    model.forward = MethodType(_score, model)
    return model


def _config(source: str, head: str, overrides: Mapping[str, Any] | None) -> Any:
    # transformers' default is two labels, also for the folder of a causal LM.
    config = AutoConfig.from_pretrained(
        source, **{**(overrides or {}), "num_labels": 1}
    )
    _check_architecture(config, head)
    return config


def _check_architecture(config: Any, head: str) -> None:
    if type(config) not in SCALAR_HEADS[head]._model_mapping:
        raise UnsupportedModelError(
            f"policy.head is {head!r}, and transformers has no "
            f"{SCALAR_HEADS[head].__name__} for {type(config).__name__}; use a model "
            "such as Qwen2, Qwen3 or Llama"
        )


def scalar_head_name(model: Any) -> str:
    """Return the name of a model's scalar head.

    Raises:
        UnsupportedModelError: The model has none.
    """
    for name in _HEAD_NAMES:
        if isinstance(getattr(model, name, None), nn.Linear):
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__} has no linear layer named {' or '.join(_HEAD_NAMES)} "
        "as its head; use a model such as Qwen2, Qwen3 or Llama"
    )


@torch.no_grad()
def _draw_head(layer: nn.Linear, name: str, missing: set[str], seed: int) -> None:
    # A generator of its own: ranks must draw the same head, whatever they drew before.
    generator = torch.Generator().manual_seed(seed)
    if f"{name}.weight" in missing:
        std = 1.0 / (layer.in_features + 1)
        layer.weight.normal_(0.0, std, generator=generator)
    if f"{name}.bias" in missing:
        layer.bias.zero_()


def _score(model: Any, positions: Tensor, **inputs: Any) -> Tensor:
    """Return [N] outputs of the head at positions of the flattened tokens, in float32.

    A dropout of the head is left out: these are numbers and not classes.
    """
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)[positions]
    layer = getattr(model, scalar_head_name(model))
    bias = None if layer.bias is None else layer.bias.float()
    # In bfloat16 values that differ by half a percent may be equal.
    with torch.autocast(hidden.device.type, enabled=False):
        scores = linear(hidden.float(), layer.weight.float(), bias)
    return scores.squeeze(-1)
