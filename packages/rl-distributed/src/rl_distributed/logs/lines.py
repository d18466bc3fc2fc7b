"""Formats of log records: a readable line, or a JSON object."""

from __future__ import annotations

import json
import logging
import math
import socket
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rl_distributed.redaction import (
    REDACTED,
    hide_values,
    is_secret_name,
    is_secret_variable,
    redacted,
    secret_values,
)

__all__ = ["SEEN_ATTRIBUTE", "ConsoleFormatter", "JsonFormatter"]

# Attribute of a record: which of our handlers have had it.
SEEN_ATTRIBUTE = "_rl_distributed_seen"
_STANDARD_ATTRIBUTES = frozenset(
    vars(logging.LogRecord("", 0, "", 0, "", (), None))
) | {"message", "asctime", "taskName", "context", SEEN_ATTRIBUTE, "_ray_timestamp_ns"}


class ConsoleFormatter(logging.Formatter):
    """`12:30:01 INFO rl_models.policy [step=3 rank=0] message`."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")
        # Collected once: the environment is searched for every line otherwise.
        self._secrets = secret_values()

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        context = _safe(getattr(record, "context", None) or {})
        fields = " ".join(f"{key}={value}" for key, value in context.items())
        head = f"{self.formatTime(record, self.datefmt)} {record.levelname}"
        where = f"{record.name} [{fields}]" if fields else record.name
        text = f"{head} {where} {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            text = f"{text}\n{self.formatStack(record.stack_info)}"
        return hide_values(redacted(text), self._secrets)


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    Keys that every line has: `time` (UTC, ISO 8601), `level`, `logger`, `message`,
    `actor` (the worker group, or `driver`), `rank` (null in the driver), `node`, `pid`
    and `step` (null outside of one). Then the other fields of the context, the `extra`
    fields of the call, and `exception` where there is one: `type`, `message` and
    `traceback`. A field that JSON has no type for is written as text. Texts under the
    name of a secret become `***`, and so do, everywhere, the environment's secrets,
    private keys, passwords in addresses and the like.
    """

    def __init__(self) -> None:
        super().__init__()
        values = secret_values()
        # Also as they stand between the quotes of JSON.
        escaped = [json.dumps(value, ensure_ascii=False)[1:-1] for value in values]
        self._secrets = [*values, *escaped]
        self._node = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        context = getattr(record, "context", None) or {}
        extra = {
            key: value
            for key, value in vars(record).items()
            if key not in _STANDARD_ATTRIBUTES
        }
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
            "actor": "driver",
            "rank": None,
            "node": self._node,
            "pid": record.process,
            "step": None,
        }
        # Fields of a caller must not replace the ones that every line is read by.
        own = ("time", "level", "logger", "message", "pid")
        added = _safe({**extra, **context})
        line.update((k, v) for k, v in added.items() if k not in own)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _exception_fields(record.exc_info[1])
        if record.stack_info:
            line["stack"] = record.stack_info
        # Hidden again in the whole line, because values may turn up anywhere.
        text = json.dumps(_finite(line), default=str, ensure_ascii=False)
        return hide_values(text, self._secrets)


def _safe(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields without secrets."""
    shown: dict[str, Any] = {}
    for name, value in fields.items():
        secret = is_secret_name(name) or is_secret_variable(name)
        hidden = secret and isinstance(value, str | bytes) and value
        shown[name] = REDACTED if hidden else redacted(value)
    return shown


def _finite(value: Any) -> Any:
    """Return a tree in which NaN and infinities, which JSON lacks, are texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _exception_fields(error: BaseException) -> dict[str, str]:
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "type": f"{module}{kind.__qualname__}",
        "message": redacted(str(error)),
        "traceback": redacted("".join(traceback.format_exception(error)).rstrip()),
    }
