"""Configurations of NeMo RL: mappings, or objects with keys as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.errors import ConfigError

__all__ = ["as_keys", "refuse_keys", "take_only"]


def as_keys(config: Any) -> dict[str, Any]:
    """Return a configuration as a dict of its keys.

    Args:
        config: A mapping, a pydantic object, or one with attributes; None for {}.
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
    """Remove unsupported keys that have their neutral value.

    Args:
        keys: The configuration, modified in place.
        refused: For each unsupported key its neutral value, and an alternative.
        what: Name of the configuration in messages.

    Raises:
        ConfigError: An unsupported key has another value.
    """
    for key, (neutral, instead) in refused.items():
        value = keys.pop(key, neutral)
        # Empty values such as None and {} ask for nothing either.
        if value != neutral and value:
            raise ConfigError(f"{what}.{key}={value!r} is not here: {instead}")


def take_only(keys: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Return the known keys that are set."""
    return {key: keys[key] for key in known if keys.get(key) is not None}
