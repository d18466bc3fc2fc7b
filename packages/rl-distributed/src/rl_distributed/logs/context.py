"""Fields of log lines: who this process is, and what it is doing at the moment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = [
    "current_log_context",
    "identify_process",
    "log_context",
    "plain_log_context",
]

_RANK_VARIABLES = {"rank": "RANK", "node_rank": "NODE_RANK"}
# Unlike a context, it holds for all threads.
_process: dict[str, Any] = {}
_context: ContextVar[Mapping[str, Any] | None] = ContextVar(
    "rl_distributed_log_context", default=None
)


def identify_process(**fields: Any) -> None:
    """Add fields to every log line of this process from now on."""
    _process.update(fields)


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Add fields, such as `step` or `rank`, to every log line of the block.

    Blocks nest; an inner field hides an outer one of the same name. The fields follow
    `async` tasks and calls of worker groups. A thread begins without them: enter a
    block in the thread itself.
    """
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def current_log_context() -> dict[str, Any]:
    """Return the fields that a log line written now would carry.

    Actor, rank and node of a worker process come first; `log_context` hides them.
    """
    fields: dict[str, Any] = dict(_process)
    for name, variable in _RANK_VARIABLES.items():
        value = os.environ.get(variable, "")
        if value.isdigit():
            fields[name] = int(value)
    fields.update(_context.get() or {})
    return fields


def plain_log_context() -> dict[str, Any]:
    """Return the fields of the surrounding blocks; other than plain values as text."""
    plain = (str, int, float, bool, type(None))
    fields = _context.get() or {}
    return {k: v if isinstance(v, plain) else str(v) for k, v in fields.items()}
