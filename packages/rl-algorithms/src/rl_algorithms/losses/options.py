"""Options of a loss, given as an object or as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rl_distributed.config import Config

__all__ = ["read_options"]

OptionsT = TypeVar("OptionsT", bound=Config)


def read_options(
    options_class: type[OptionsT],
    config: OptionsT | Mapping[str, Any] | None,
    loss: str,
) -> OptionsT:
    """Return the options as an object.

    Args:
        options_class: Class of the options.
        config: The options, a mapping to validate, or None for the defaults.
        loss: Name of the loss, for messages.

    Raises:
        ConfigError: A key is unknown, or a value is wrong.
    """
    # Already validated, and frozen, so that it can be shared without a copy.
    if isinstance(config, options_class):
        return config
    return options_class.from_dict(dict(config or {}), source=loss)
