"""The `config.json` of a model, without a network and without transformers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_models.checkpoint.model_folder import read_model_config
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError

__all__ = ["model_config"]


def model_config(policy: PolicyConfig) -> dict[str, Any]:
    """Read what a model's `config.json` says, overrides included.

    Args:
        policy: Section `policy`; its model is a folder, which needs no weights, or a
            name on the hub that the cache has.

    Raises:
        ModelLoadError: There is no such folder, or the cache does not have the name.
    """
    config = read_model_config(policy.model_name)
    if config is None:
        config = _cached(policy.model_name)
    return {**config, **policy.hf_config_overrides}


def _cached(name: str) -> dict[str, Any]:
    hub = import_module("huggingface_hub")
    errors = import_module("huggingface_hub.errors")
    try:
        file = hub.try_to_load_from_cache(name, "config.json")
    except errors.HFValidationError:
        file = None
    if not isinstance(file, str):
        raise ModelLoadError(
            f"the model {name!r} is neither a folder here nor in the cache of the hub, "
            "which a plan does not ask: put its config.json into a folder (no weights "
            "are needed) and set policy.model_name to the path of that folder"
        )
    config: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return config
