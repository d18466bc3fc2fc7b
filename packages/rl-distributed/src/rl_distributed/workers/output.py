"""Keep a worker's secrets out of its output, which Ray writes to a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rl_distributed.redaction import REDACTED, hide_values
from rl_distributed.secret_variables import secret_texts

__all__ = ["hide_secrets_in_output"]


class _HidingBuffer:
    """The bytes below a standard stream."""

    def __init__(self, buffer: Any, values: Iterable[str]) -> None:
        self._buffer = buffer
        self._values = [value.encode() for value in values]

    def write(self, data: Any) -> int:
        """Write bytes without the secrets."""
        hidden = bytes(data)
        for value in self._values:
            hidden = hidden.replace(value, REDACTED.encode())
        self._buffer.write(hidden)
        # The caller's own length: from its point of view all of it was written.
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


class _HidingStream:
    """A standard stream; Python writes each argument of `print` in one piece."""

    def __init__(self, stream: TextIO, values: tuple[str, ...]) -> None:
        self._stream = stream
        self._values = values

    @property
    def buffer(self) -> _HidingBuffer:
        """The bytes below."""
        return _HidingBuffer(self._stream.buffer, self._values)

    def write(self, text: str) -> int:
        """Write text without the secrets."""
        self._stream.write(hide_values(text, self._values))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines without the secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hide_secrets_in_output() -> None:
    """Put `***` for the values of secret variables in what this process prints.

    Covers `sys.stdout` and `sys.stderr`, and so uncaught exceptions and warnings. What
    native code and child processes write goes past it: a pipe in between would lose the
    last words of a process that crashes.
    """
    values = secret_texts(os.environ)
    if values:
        sys.stdout = cast("TextIO", _HidingStream(sys.stdout, values))
        sys.stderr = cast("TextIO", _HidingStream(sys.stderr, values))
