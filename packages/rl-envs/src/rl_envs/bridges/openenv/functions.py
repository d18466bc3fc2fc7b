"""Functions of the user, by file or module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rl_distributed.errors import ConfigError
from rl_envs.python_file import existing_file, load_from_file

__all__ = ["absolute_name", "load_function"]


def absolute_name(name: str) -> str:
    """Return `file.py:name` with the path made absolute, or `package.module:name`.

    Raises:
        ValueError: It is neither, or there is no such file.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise ValueError(
            f"must be a function, as file.py:name or package.module:name: got {name!r}"
        )
    # Workers may run in another folder.
    return f"{existing_file(place)}:{function}" if place.endswith(".py") else name


def load_function(name: str) -> Callable[[Any], Any]:
    """Return the function of a name.

    Raises:
        PythonFileError: The file cannot be run, or has no such function.
        ConfigError: The module cannot be imported, or has no such function.
    """
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        found: Callable[[Any], Any] = load_from_file(
            place, function, kind="openenv", thing="function"
        )
        return found
    try:
        found = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{name!r} must be a function of a module that can be imported: {error}"
        ) from error
    return found
