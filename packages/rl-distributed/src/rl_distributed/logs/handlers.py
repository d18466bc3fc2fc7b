"""Handlers and filters of the log: a JSON file, standard error, context, quiet."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from rl_distributed.errors import ConfigError
from rl_distributed.logs.context import current_log_context
from rl_distributed.logs.levels import LEVELS
from rl_distributed.logs.lines import SEEN_ATTRIBUTE, JsonFormatter
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["ContextFilter", "QuietFilter", "StandardErrorHandler", "open_json_file"]


class ContextFilter(logging.Filter):
    """Freezes the context into the record, in the thread that logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the handler gets the record."""
        seen: set[int] = vars(record).setdefault(SEEN_ATTRIBUTE, set())
        if id(self) in seen or record.levelno < LEVELS.level_of(record.name):
            # A logger that was detached from the root may be attached again, so that
            # its records come twice; and Ray sets its logger's level when it starts.
            return False
        seen.add(id(self))
        if not hasattr(record, "context"):
            record.context = current_log_context()
        return True


class QuietFilter(logging.Filter):
    """Keeps from a handler what our packages log only for the file."""

    def __init__(self, before: Mapping[logging.Logger, int], root_level: int) -> None:
        super().__init__()
        self._before = dict(before)
        self._root_level = root_level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the handler gets the record."""
        package = logging.getLogger(record.name.partition(".")[0])
        if package not in LEVELS.packages:
            return True
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger is not package:
            if logger.level:  # the program has asked for it
                return True
            logger = logger.parent
        return record.levelno >= (self._before.get(package, 0) or self._root_level)


class StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Write to what `sys.stderr` is now: a stream that replaced it may be closed."""

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore what the base class would keep."""


class _JsonFileHandler(logging.FileHandler):
    """Reports once, and not for every line, that its file cannot be written."""

    _has_reported = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._json = JsonFormatter()

    def _open(self) -> TextIOWrapper:
        # With a literal mode, so that type checkers know the kind of stream.
        return open(
            self.baseFilename,
            "a",
            encoding=self.encoding,
            errors=self.errors,
            opener=private_opener,
        )

    def format(self, record: logging.LogRecord) -> str:
        # Ray gives the handlers of its own logger a formatter when it starts.
        return self._json.format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        # An error in formatting a line is a bug and is reported as usual.
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_reported:
            self._has_reported = True
            text = f"log file {self.baseFilename} cannot be written: {error.strerror}"
            sys.stderr.write(f"{text}; lines are lost there\n")


def open_json_file(path: Path) -> logging.Handler:
    """Open a file that JSON lines are appended to; it and its folder are private.

    Raises:
        ConfigError: The file cannot be opened.
    """
    try:
        create_private_folder(path.parent)
        handler = _JsonFileHandler(path)
    except OSError as error:
        raise ConfigError(
            f"json_path: cannot write the log file {path}: {error.strerror}; "
            "name a file in a folder that you may write to"
        ) from error
    handler.addFilter(ContextFilter())
    return handler
