"""The `config.json` of a model, without a network and without transformers."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from rl_models.checkpoint.model_folder import read_model_config
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError

__all__ = ["known_models", "model_config"]

_VARIANTS = ("-Instruct", "-Base")


def model_config(policy: PolicyConfig) -> dict[str, Any]:
    """Return a model's `config.json` with overrides.

    Args:
        policy: Section `policy`; its model is a folder, which needs no weights, a name
            on the hub that the cache has, or one of `known_models`.

    Raises:
        ModelLoadError: There is no such folder, and the name is neither in the cache
            nor known.
    """
    name = policy.model_name
    config = read_model_config(name) or _cached(name) or _known(name)
    if config is None:
        raise ModelLoadError(
            f"the model {name!r} is neither a folder here nor in the cache of the hub, "
            "which a plan does not ask: put its config.json into a folder (no weights "
            "are needed) and set policy.model_name to the path of that folder; what "
            f"this package knows is the sizes of {', '.join(known_models())}"
        )
    return {**config, **policy.hf_config_overrides}


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the sizes of some published models by their names on the hub.

    They are those of the models' `config.json` files. An instruction-tuned variant
    (`-Instruct`, `-Base`) has the sizes of the name without that ending.
    """
    file = resources.files("rl_models.planning") / "known_models.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _known(name: str) -> dict[str, Any] | None:
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    return known_models().get(name)


def _cached(name: str) -> dict[str, Any] | None:
    hub = import_module("huggingface_hub")
    errors = import_module("huggingface_hub.errors")
    try:
        file = hub.try_to_load_from_cache(name, "config.json")
    except errors.HFValidationError:
        file = None
    if not isinstance(file, str):
        return None
    config: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return config
