"""Output of `rl` except for the progress of a run: messages and tables.

Results go to standard output and progress to standard error, so that programs can read
the former and people the latter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl_distributed.logs.terminal_stream import TerminalStream

__all__ = ["Listing", "Terminal", "table"]

_INDENT = (0, 0, 0, 4)
_BETWEEN = "   "
"""Blanks between the cells of a line of a list."""
_LEAST_TEXT = 24
"""Width reserved for long text before a table is replaced by a list."""


class Terminal:
    """Standard output for results and standard error for progress.

    Args:
        quiet: Print no progress at all.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        # Looked up for each line, like rich does: notebooks and tests replace it.
        out = cast("IO[str]", TerminalStream(lambda: sys.stdout))
        err = cast("IO[str]", TerminalStream(lambda: sys.stderr))
        # No highlighting and no hard breaks: results are copied and read by programs.
        self.out = Console(file=out, highlight=False, soft_wrap=True)
        self.err = Console(file=err, highlight=False, quiet=quiet)

    def note(self, message: str) -> None:
        """Print one line about progress."""
        # Text, not a string: brackets in a message are no markup.
        self.err.print(Text(message), soft_wrap=True)

    def result(self, renderable: object) -> None:
        """Print a result."""
        self.out.print(renderable, soft_wrap=isinstance(renderable, str))

    def raw(self, text: str) -> None:
        """Print text to standard output unchanged."""
        # Past rich, which would interpret brackets and wrap at the width of the
        # terminal.
        self.out.file.write(text + "\n")
        # Now: a program at the other end of a pipe may be waiting for this line.
        self.out.file.flush()


class Listing:
    """Rows with named columns, shown as a table or, if that is too wide, as a list.

    Only cells of the last column are broken into lines, so that names can be copied.
    Numbers are aligned to the right. Columns that can be spared are left out of a
    table that would be too wide; a line below it names them.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        spare: Sequence[str] = (),
    ) -> None:
        self.title, self.columns, self._spare = title, list(columns), list(spare)
        self._values = [list(row) for row in rows]
        self.rows = [[_shown(value) for value in row] for row in rows]
        self._numeric = [
            bool(rows) and all(isinstance(row[index], int | float) for row in rows)
            for index in range(len(columns))
        ]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Render the table or the list."""
        for number in range(len(self._spare) + 1):
            left_out = self._spare[:number]
            shown = self._without(left_out)
            if shown._least_width() <= options.max_width:
                yield shown._table()
                if left_out:
                    names = ", ".join(left_out)
                    yield Text(f"left out at this width: {names}", style="dim")
                return
        yield from self._list(options.max_width)

    def _without(self, names: Sequence[str]) -> Listing:
        kept = [i for i, name in enumerate(self.columns) if name not in names]
        rows = [[row[index] for index in kept] for row in self._values]
        return Listing(self.title, [self.columns[index] for index in kept], rows)

    def _least_width(self) -> int:
        widths = []
        for index, column in enumerate(self.columns):
            cells = [column, *(row[index] for row in self.rows)]
            # The last column may be broken between words.
            if index == len(self.columns) - 1:
                cells = [word for cell in cells for word in cell.split()]
            widths.append(max(map(cell_len, cells), default=0))
        last = max(widths[-1], min(_LEAST_TEXT, self._text_width()))
        # A border and two blanks per column, and the last border.
        return sum(widths[:-1]) + last + 3 * len(widths) + 1

    def _text_width(self) -> int:
        return max((cell_len(row[-1]) for row in self.rows), default=0)

    def _table(self) -> Table:
        built = Table(title=self.title, title_justify="left", header_style="bold")
        last = len(self.columns) - 1
        for index, column in enumerate(self.columns):
            justify: JustifyMethod = "right" if self._numeric[index] else "left"
            built.add_column(
                column, justify=justify, no_wrap=index != last, overflow="fold"
            )
        for row in self.rows:
            # Cells may hold brackets, which a string would make markup.
            built.add_row(*map(Text, row))
        return built

    def _list(self, width: int) -> Iterator[RenderableType]:
        yield Text(self.title, style="italic")
        for row in self.rows:
            cells = [cell for cell in zip(self.columns, row, strict=True) if cell[1]]
            if cells:
                yield Text(cells[0][1], style="bold", overflow="fold")
            for line in _lines(cells[1:], width - _INDENT[-1]):
                yield Padding(Text(line, overflow="fold"), _INDENT, expand=False)


def _lines(cells: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield lines of named cells, as many in each as fit."""
    line = ""
    for column, value in cells:
        text = f"{column}: {value}"
        joined = f"{line}{_BETWEEN}{text}" if line else text
        if line and cell_len(joined) > width:
            yield line
            joined = text
        line = joined
    if line:
        yield line


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    spare: Sequence[str] = (),
) -> Listing:
    """Build a table with numbers aligned to the right.

    Args:
        title: Text above the table.
        columns: Names of the columns; long texts belong in the last one.
        rows: Values, one sequence per row.
        spare: Names of columns that are left out where the table would be too wide,
            the first ones first.
    """
    return Listing(title, columns, rows, spare)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_shown(v)}" for k, v in value.items())
    return "" if value is None else str(value)
