"""The latest error lines of an engine's log, kept in its process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

__all__ = ["RecentErrors", "relevant_lines"]

_MOST_LINES, _MOST_CHARACTERS = 200, 4_000
_MOST_RELEVANT = 20


class RecentErrors(logging.Handler):
    """Keeps the last errors of a logger and of all below it.

    Args:
        name: The logger, such as `vllm`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.ERROR)
        self._kept: deque[tuple[float, str]] = deque(maxlen=_MOST_LINES)
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line, with its traceback if it has one."""
        try:
            self._kept.append((time.time(), self.format(record)[:_MOST_CHARACTERS]))
        except Exception:
            self.handleError(record)

    def since(self, time_s: float) -> list[str]:
        """Return the lines since a time of `time.time()`, the oldest first."""
        # A copy, because other threads may log meanwhile.
        return [line for at_s, line in list(self._kept) if at_s >= time_s]


def relevant_lines(lines: Iterable[str], request_id: str) -> list[str]:
    """Return the lines that name a request, or all of them if none does."""
    found = list(lines)
    named = [line for line in found if request_id and request_id in line]
    return (named or found)[-_MOST_RELEVANT:]
