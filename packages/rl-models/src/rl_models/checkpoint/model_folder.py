"""Checks of a model folder that need neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_models.checkpoint.context_length import CONTEXT_KEYS
from rl_models.errors import ModelLoadError

__all__ = ["check_model_folder", "folder_context_length", "read_model_config"]


def check_model_folder(name_or_path: str | Path) -> Path | None:
    """Check that a model folder exists; return None if it must be a hub name.

    Raises:
        ModelLoadError: The folder does not exist or has no `config.json`.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"the model folder {path} has no config.json; give a folder written by "
                "save_pretrained, or a step folder's policy/weights"
            )
        return path
    if path.is_file():
        raise ModelLoadError(
            f"the model {text!r} is a file; give the path of a folder with config.json "
            "and model.safetensors, or a hub name like 'org/name'"
        )
    # A misspelled path must not be looked up on the hub, whose error would mislead.
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1 or not text
    if looks_local or path.exists():
        raise ModelLoadError(
            f"the model folder {text!r} does not exist; give the path of a folder with "
            "config.json and model.safetensors, or a hub name like 'org/name'"
        )
    return None


def read_model_config(name_or_path: str | Path) -> dict[str, Any] | None:
    """Return the `config.json` of a model folder; None for a hub name."""
    folder = check_model_folder(name_or_path)
    if folder is None:
        return None
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    return config


def folder_context_length(name_or_path: str | Path) -> int | None:
    """Return the longest sequence of a model folder; None if it is not known."""
    config = read_model_config(name_or_path) or {}
    # Multimodal models have the settings of their language model in a section.
    for section in (config, config.get("text_config")):
        for key in CONTEXT_KEYS:
            value = section.get(key) if isinstance(section, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return None
