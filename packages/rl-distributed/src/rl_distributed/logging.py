"""Structured logs: readable lines on the terminal, JSON lines in a file.

Nothing here runs on import. A program calls `configure_logging` once; libraries only
call `get_logger`. Each JSON line carries the fields of the surrounding `log_context`
blocks and, in a worker, its rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rl_distributed.errors import ConfigError

__all__ = [
    "ConsoleFormatter",
    "JsonFormatter",
    "configure_logging",
    "current_log_context",
    "get_logger",
    "log_context",
]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_RANK_VARIABLES = {"rank": "RANK", "node_rank": "NODE_RANK"}
_STANDARD_ATTRIBUTES = frozenset(
    vars(logging.LogRecord("", 0, "", 0, "", (), None))
) | {"message", "asctime", "taskName", "context"}

# What the last `configure_logging` put on the root logger of this process.
_installed: list[logging.Handler] = []
_level: list[int] = []
_packages: set[logging.Logger] = set()
_context: ContextVar[Mapping[str, Any] | None] = ContextVar(
    "rl_distributed_log_context", default=None
)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`.

    Only loggers of packages that were asked for here log below INFO: other libraries
    would drown them.
    """
    package = logging.getLogger(name.partition(".")[0])
    _packages.add(package)
    if _level:
        package.setLevel(_level[0])
    return logging.getLogger(name)


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Add fields, such as `step` or `rank`, to every log line of the block.

    Blocks nest; an inner field hides an outer one of the same name. The fields follow
    `async` tasks. A thread begins without them: enter a block in the thread itself.
    """
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def current_log_context() -> dict[str, Any]:
    """Return the fields that a log line written now would carry.

    The rank variables of a worker process come first; `log_context` hides them.
    """
    fields: dict[str, Any] = {}
    for name, variable in _RANK_VARIABLES.items():
        value = os.environ.get(variable, "")
        if value.isdigit():
            fields[name] = int(value)
    fields.update(_context.get() or {})
    return fields


class _ContextFilter(logging.Filter):
    """Freezes the context into the record, in the thread that logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.context = current_log_context()
        return True


class ConsoleFormatter(logging.Formatter):
    """`12:30:01 INFO rl_models.policy [step=3 rank=0] message`."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        context = getattr(record, "context", None) or {}
        fields = " ".join(f"{key}={value}" for key, value in context.items())
        head = f"{self.formatTime(record, self.datefmt)} {record.levelname}"
        where = f"{record.name} [{fields}]" if fields else record.name
        text = f"{head} {where} {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    Keys: `time` (UTC, ISO 8601), `level`, `logger`, `message`, `pid`, the fields of the
    context, the `extra` fields of the call, and `exception` where there is one. A field
    that JSON has no type for is written as text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        extra = {
            key: value
            for key, value in vars(record).items()
            if key not in _STANDARD_ATTRIBUTES
        }
        line: dict[str, Any] = {
            **extra,
            **(getattr(record, "context", None) or {}),
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _check_level(level: str | int) -> int:
    if isinstance(level, int):
        return level
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(
            f"log level must be one of {', '.join(_LEVELS)}: got {level!r}"
        )
    return number


def configure_logging(
    level: str | int = "INFO",
    json_path: str | os.PathLike[str] | None = None,
    *,
    stream: TextIO | None = None,
) -> None:
    """Send the logs of this process to the terminal and, if asked, to a file.

    Calling it again replaces what the last call set up; handlers of others stay.

    Args:
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        json_path: A file that JSON lines are appended to; its folder is created.
        stream: Where readable lines go; standard error if None.

    Raises:
        ConfigError: The level is unknown, or the file cannot be opened.
    """
    number = _check_level(level)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    handlers[0].setFormatter(ConsoleFormatter())
    if json_path is not None:
        path = Path(json_path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(path, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"json_path: cannot write the log file {path}: {error.strerror}; "
                "name a file in a folder that you may write to"
            ) from error
        handlers[1].setFormatter(JsonFormatter())
    root = logging.getLogger()
    while _installed:
        old = _installed.pop()
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        _installed.append(handler)
        handler.addFilter(_ContextFilter())
        root.addHandler(handler)
    root.setLevel(max(number, logging.INFO))
    _level[:] = [number]
    for package in _packages:
        package.setLevel(number)
