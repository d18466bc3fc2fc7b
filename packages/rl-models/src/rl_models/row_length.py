"""The default of the longest row: the model's context.

A folder has its context in `config.json`, so it is known when a configuration is read.
That of a model on the hub is looked up when a run begins. Imports neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_models.checkpoint.model_folder import check_model_folder, folder_context_length
from rl_models.errors import ModelLoadError

__all__ = ["UNKNOWN_CONTEXT", "context_of_folder", "default_row_length", "fitting"]

UNKNOWN_CONTEXT = 2048
"""Longest row of a model whose context is not known."""

_BUDGETS = ("train_mb_tokens", "logprob_mb_tokens")


def default_row_length(policy: Mapping[str, Any]) -> int | None:
    """Return the longest row of a section `policy` as it was written.

    Args:
        policy: The section, not validated yet.

    Returns:
        The context of its model, or less if another setting of the section allows less;
        None if the model is no folder that can be read.
    """
    context = context_of_folder(policy)
    return None if context is None else fitting(context, policy)


def context_of_folder(policy: Mapping[str, Any]) -> int | None:
    """Return the context of a section's model; None if it is no existing folder."""
    overrides, name = policy.get("hf_config_overrides"), policy.get("model_name")
    if isinstance(overrides, Mapping):
        overridden = overrides.get("max_position_embeddings")
        if isinstance(overridden, int) and overridden > 0:
            return overridden
    if not isinstance(name, str | Path):
        return None
    try:
        if check_model_folder(name) is None:
            return None
        return folder_context_length(name) or UNKNOWN_CONTEXT
    except ModelLoadError:
        return None  # reported when the model is loaded


def fitting(context: int, policy: Mapping[str, Any]) -> int:
    """Return the longest row of a model that all settings of a section allow.

    Args:
        context: The model's context.
        policy: The section.
    """
    return max(2, min([context, *_bounds(policy)]))


def _bounds(policy: Mapping[str, Any]) -> Iterator[int]:
    for name in ("dynamic_batching", "sequence_packing"):
        section = policy.get(name)
        if not isinstance(section, Mapping):
            continue
        multiple = section.get("sequence_length_pad_multiple", 1)
        if not isinstance(multiple, int) or multiple < 1:
            multiple = 1
        for key in _BUDGETS:
            budget = section.get(key)
            if isinstance(budget, int) and not isinstance(budget, bool):
                yield budget // multiple * multiple
    generation = policy.get("generation")
    if isinstance(generation, Mapping):
        limit = generation.get("max_context_length")
        if isinstance(limit, int) and not isinstance(limit, bool):
            yield limit
