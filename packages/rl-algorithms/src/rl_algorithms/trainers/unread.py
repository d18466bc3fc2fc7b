"""Keys that a configuration has and an algorithm does not read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_distributed.config import Config
from rl_distributed.config.schema import SchemaNode

__all__ = ["OF_CONVERSATIONS", "OF_PAIRS", "refuse_unread"]

OF_PAIRS = ("data.chosen_key", "data.rejected_key")
"""Keys of data that only those read that learn from pairs of answers."""
OF_CONVERSATIONS = ("data.roles_to_train_on", "data.only_unmask_final")
"""Keys of data that only those read that imitate."""


def refuse_unread(config: Config, keys: Iterable[str]) -> None:
    """Check that keys that are not read are not set.

    Args:
        config: The whole configuration.
        keys: Their dotted paths; a section stands for all its keys.

    Raises:
        ValueError: One has another value than its default.
    """
    schema = SchemaNode.of(type(config))
    for key in keys:
        path = tuple(key.split("."))
        value, default = _at(config, path), schema.default(path)
        if value != default:
            raise ValueError(
                f"{key} is not read here, so it must not be set: got {value!r}; leave "
                f"it out ({default!r})"
            )


def _at(config: Config, path: tuple[str, ...]) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value.to_dict() if isinstance(value, Config) else value
