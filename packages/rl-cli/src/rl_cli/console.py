"""All that `rl` prints but the progress of a run: messages and tables.

Results go to standard output, everything about progress to standard error, so that a
program can read the one and a person the other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_distributed.terminal_stream import TerminalStream

__all__ = ["Terminal", "table"]


class Terminal:
    """Standard output for results and standard error for progress.

    Args:
        quiet: Print no progress at all.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        # What `sys.stdout` is at each line, as rich itself looks it up.
        out = cast("IO[str]", TerminalStream(lambda: sys.stdout))
        err = cast("IO[str]", TerminalStream(lambda: sys.stderr))
        self.out = Console(file=out, highlight=False, soft_wrap=True)
        self.err = Console(file=err, highlight=False, quiet=quiet)

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
