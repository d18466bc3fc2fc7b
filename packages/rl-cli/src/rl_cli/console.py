"""All that `rl` prints: messages, tables and the live display of a run.

Results go to standard output, everything about progress to standard error, so that a
program can read the one and a person the other.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Terminal", "table"]


class _TerminalStream:
    """A standard stream that is written to for as long as there is a terminal.

    Where that is closed every write fails with EIO, and a run that outlives it, or that
    saves itself because of it, must not end by a line about its progress.
    """

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, if anybody can see it."""
        self._unless_gone(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._unless_gone(lambda stream: stream.flush())

    def _unless_gone(self, act: Callable[[TextIO], object]) -> None:
        # While rich draws in place the standard streams are proxies that write here.
        stream = self._stream()
        stream = getattr(stream, "rich_proxied_file", stream)
        try:
            act(stream)
        except OSError as error:
            if error.errno != errno.EIO:
                raise

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":
            raise AttributeError(name)  # rich would write to it past this object
        return getattr(self._stream(), name)


class Terminal:
    """Standard output for results and standard error for progress.

    Args:
        quiet: Print no progress at all.
        plain: Never draw in place; print one line per event. Default: when standard
            error is not a terminal.
    """

    def __init__(self, *, quiet: bool = False, plain: bool | None = None) -> None:
        self.quiet = quiet
        # What `sys.stdout` is at each line, as rich itself looks it up.
        out = cast("IO[str]", _TerminalStream(lambda: sys.stdout))
        err = cast("IO[str]", _TerminalStream(lambda: sys.stderr))
        self.out = Console(file=out, highlight=False, soft_wrap=True)
        self.err = Console(file=err, highlight=False, quiet=quiet)
        self.plain = not self.err.is_terminal if plain is None else plain

    def note(self, message: str) -> None:
        """Print one line about progress."""
        self.err.print(Text(message), soft_wrap=True)

    def result(self, renderable: object) -> None:
        """Print a result."""
        self.out.print(renderable)

    def raw(self, text: str) -> None:
        """Print text to standard output exactly as it is."""
        self.out.file.write(text + "\n")
        self.out.file.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Build a table; numbers are aligned to the right.

    Args:
        title: Text above the table.
        columns: Names of the columns.
        rows: Values, one sequence per row.
    """
    built = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        values = [row[index] for row in rows]
        numeric = bool(values) and all(isinstance(v, int | float) for v in values)
        built.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        built.add_row(*(Text(_shown(value)) for value in row))
    return built


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_shown(v)}" for k, v in value.items())
    return "" if value is None else str(value)
