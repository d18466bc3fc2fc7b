"""Importing the package that a sink writes with, when the sink is made."""

from __future__ import annotations

import importlib
from typing import Any

from rl_distributed.errors import RegistryError

__all__ = ["import_engine"]


def import_engine(module: str, sink: str, package: str) -> Any:
    """Import a module that only one sink needs.

    Args:
        module: What to import.
        sink: Name of the sink, which is also the extra of rl-distributed.
        package: What the message calls the missing package.

    Raises:
        RegistryError: It cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RegistryError(
            f"logger.sinks: {sink!r} needs the package {package}, which cannot "
            f"be imported ({error}); pip install 'rl-distributed[{sink}]'"
        ) from error
