"""Their configurations: mappings of keys, or objects with them as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.errors import ConfigError

__all__ = ["as_keys", "refuse_keys", "take_only"]


def as_keys(config: Any) -> dict[str, Any]:
    """Return a configuration as a dict of its keys.

    Args:
        config: A mapping, an object of pydantic, or one with attributes; None: nothing.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    dump = getattr(config, "model_dump", None)
    return dict(dump() if dump is not None else vars(config))


def refuse_keys(
    keys: dict[str, Any], refused: Mapping[str, tuple[Any, str]], what: str
) -> None:
    """Take keys out that have no counterpart here, if their value asks for nothing.

    Args:
        keys: The configuration; changed.
        refused: By key, the value that asks for nothing, and what to do instead.
        what: Name of the configuration, for messages.

    Raises:
        ConfigError: A key asks for something.
    """
    for key, (neutral, instead) in refused.items():
        value = keys.pop(key, neutral)
        if value != neutral and value:
            raise ConfigError(f"{what}.{key}={value!r} is not here: {instead}")


def take_only(keys: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys that are known and set."""
    return {key: keys[key] for key in known if keys.get(key) is not None}
