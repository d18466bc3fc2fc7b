"""Importing the package that a sink writes with, when the sink is made."""

from __future__ import annotations

from typing import Any

from rl_distributed.extras import import_extra

__all__ = ["import_engine"]


def import_engine(module: str, sink: str, package: str) -> Any:
    """Import a module that only one sink needs.

    Args:
        module: What to import.
        sink: Name of the sink, which is also the extra of rl-distributed.
        package: What the message calls the missing package.

    Raises:
        MissingExtraError: It cannot be imported; the message says what to install.
    """
    return import_extra(module, sink, package, f"logger.sinks: {sink!r}")
