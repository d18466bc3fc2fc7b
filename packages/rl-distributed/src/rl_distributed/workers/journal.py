"""Log lines that every worker writes: its start, its settings and its errors."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rl_distributed.logs.logging import get_logger
from rl_distributed.redaction import redacted

__all__ = ["log_error", "log_made", "log_start"]

_logger = get_logger(__name__)
# Versions are read only of imported libraries: importing torch alone takes a second.
_LIBRARIES = ("ray", "torch", "transformers", "vllm", "numpy")

_LONGEST = 20_000
_DEEPEST = 8


def log_start(label: str, where: str) -> None:
    """Say that a worker's process is there, and with which Python."""
    _logger.info("%s has started on %s; Python %s", label, where,
                 platform.python_version())  # fmt: skip


def log_made(
    class_name: str, arguments: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    """Log the worker's settings and the versions of the libraries it has imported."""
    shown = {
        **{f"argument {i}": _plain(value, 0) for i, value in enumerate(arguments)},
        **{name: _plain(value, 0) for name, value in settings.items()},
    }
    text = json.dumps(redacted(shown))
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " ..."
    _logger.info("made %s; %s; settings: %s", class_name, _versions(), text)


def log_error(what: str, error: BaseException) -> None:
    """Keep an error with its traceback, also where its caller handles it."""
    _logger.error("%s raised %s", what, type(error).__name__, exc_info=error)


def _versions() -> str:
    """Return the versions of the libraries that the process has imported."""
    names = [
        *_LIBRARIES,
        *sorted(n for n in sys.modules if n.startswith("rl_") and "." not in n),
    ]
    found = {
        name: getattr(sys.modules[name], "__version__", None)
        for name in names
        if name in sys.modules
    }
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _plain(value: Any, depth: int) -> Any:
    """Return a value that is short enough for a log: data by its type alone."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    # Longer lists are data, not settings.
    if depth < _DEEPEST and isinstance(value, list | tuple) and len(value) <= 100:
        return [_plain(item, depth + 1) for item in value]
    return f"<{type(value).__name__}>"
