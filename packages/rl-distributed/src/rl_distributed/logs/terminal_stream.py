"""A standard stream for progress messages that survives its terminal."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from typing import Any, TextIO

__all__ = ["TerminalStream"]


class TerminalStream:
    """A standard stream that is written to for as long as there is a terminal.

    Where that is closed every write fails with EIO, and a run that outlives it, or that
    saves itself because of it, must not end by a line about its progress.

    Args:
        stream: Returns the stream, as `lambda: sys.stderr` does; asked at each write,
            because programs replace their standard streams.
        ignored: Error numbers that mean that nobody reads any more.
    """

    def __init__(
        self,
        stream: Callable[[], TextIO | None],
        *,
        ignored: Collection[int] = (errno.EIO,),
    ) -> None:
        self._stream = stream
        self._ignored = frozenset(ignored)

    def write(self, text: str) -> int:
        """Write text, if anybody can see it."""
        self._unless_gone(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._unless_gone(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether a person sees the stream."""
        stream = self._stream()
        return stream is not None and stream.isatty()

    def _unless_gone(self, act: Callable[[TextIO], object]) -> None:
        # While rich draws in place the standard streams are proxies that write here.
        stream = self._stream()
        if stream is None:  # as in a program without a console
            return
        stream = getattr(stream, "rich_proxied_file", stream)
        try:
            act(stream)
        except OSError as error:
            if error.errno not in self._ignored:
                raise

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":
            raise AttributeError(name)  # rich would write to it past this object
        return getattr(self._stream(), name)
