"""The warnings of a run: logged at once, and kept for its result."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

__all__ = ["WarningKeeper"]

_PACKAGES = ("rl_algorithms", "rl_models", "rl_envs", "rl_distributed")
_MOST = 20


class WarningKeeper(logging.Handler):
    """Collects the warnings that our packages log while it is entered, each once.

    Args:
        kept: List to append to; after twenty, further warnings are only logged.
    """

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.kept = kept
        self._loggers = [logging.getLogger(name) for name in _PACKAGES]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        if record.levelno == logging.WARNING and len(self.kept) < _MOST:
            # Formatted now: the arguments may be large objects, which should not be
            # kept.
            text = record.getMessage()
            if text not in self.kept:
                self.kept.append(text)
        if not self._is_heard(record) and logging.lastResort is not None:
            # In a program that configures no logging, this handler would be the only
            # one and suppress logging's own last resort.
            logging.lastResort.handle(record)

    def _is_heard(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
