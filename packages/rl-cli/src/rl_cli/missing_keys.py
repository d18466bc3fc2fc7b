"""Required keys of a configuration that are not set yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rl_distributed import Config, ConfigError
from rl_distributed.config import merge_configs

__all__ = ["UNSET", "fill_required", "how_to_set", "mark_required"]

UNSET = "???"
"""Placeholder in a shown configuration for a value that the user must set."""


def fill_required(
    schema: type[Config], data: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Set required keys without a value to `UNSET`.

    Values that the configuration class derives by itself, such as a section copied from
    another one, are not required.

    Args:
        schema: The class of the configuration.
        data: The tree of settings.

    Returns:
        The tree, and the dotted paths of the missing keys.
    """
    # A copy, as the caller's settings must not change.
    tree = merge_configs({}, data)
    paths = list(_required(schema))
    missing = [path for path in paths if _value(tree, path) == UNSET]
    for path in paths:
        if path in missing or _value(tree, path) is not None:
            continue
        # The class may derive the rest, so ask it before adding more.
        if _is_valid(schema, tree):
            break
        section: dict[str, Any] = {}
        below = section
        *sections, key = path.split(".")
        for name in sections:
            below[name] = below = {}
        below[key] = UNSET
        tree = merge_configs(tree, section)
        missing.append(path)
    return tree, missing


def how_to_set(paths: list[str]) -> str:
    """Return overrides that set these keys, as a line to copy."""
    examples = {"model_name": "path/to/model"}
    keys = [(path, path.rpartition(".")[2]) for path in paths]
    return " ".join(f"{path}={examples.get(key, 'VALUE')}" for path, key in keys)


def mark_required(text: str) -> str:
    """Mark each missing value in YAML as required."""
    return re.sub(rf": {re.escape(UNSET)}$", r"\g<0>  # required", text, flags=re.M)


def _required(schema: type[Config], prefix: str = "") -> Iterator[str]:
    """Yield all required keys, including those of required sections."""
    for name, field in schema.model_fields.items():
        if not field.is_required():
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Config):
            yield from _required(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _value(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def _is_valid(schema: type[Config], tree: Mapping[str, Any]) -> bool:
    try:
        schema.from_dict(tree)
    except ConfigError:
        return False
    return True
