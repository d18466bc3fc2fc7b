"""Tables of a step, in the plain and bounded form that every sink takes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rl_distributed.metrics.sink import Cell
from rl_distributed.metrics.sinks.plain import plain_tree
from rl_distributed.metrics.values import MetricError

__all__ = ["MAX_CELL_LENGTH", "MAX_TABLE_ROWS", "table_rows"]

MAX_TABLE_ROWS = 1000
"""Rows of one table; further ones are left out."""
MAX_CELL_LENGTH = 10_000
"""Characters of one cell; the end of a longer text is left out."""


def table_rows(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> list[list[Cell]]:
    """Return the rows of a table with plain cells, at most `MAX_TABLE_ROWS`.

    Args:
        name: Name of the table, for messages.
        columns: Names of its columns.
        rows: One value per column each. Lists and mappings become JSON texts, and so
            does what is no plain value; numbers that are not finite become texts.

    Raises:
        MetricError: There is no column, one is named twice, or a row has another
            number of cells than there are columns.
    """
    if not columns or len(set(columns)) < len(columns):
        raise MetricError(
            f"table {name!r} must have columns of different names: got {list(columns)}"
        )
    if wrong := [len(row) for row in rows if len(row) != len(columns)]:
        raise MetricError(
            f"table {name!r}: each row must have one cell per column: got {wrong[0]} "
            f"cells for {len(columns)} columns {list(columns)}"
        )
    return [[_cell(value) for value in row] for row in rows[:MAX_TABLE_ROWS]]


def _cell(value: Any) -> Cell:
    if isinstance(value, float) and math.isfinite(value):
        return value
    plain = plain_tree(value)
    if plain is None or isinstance(plain, bool | int | float):
        return plain
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    if len(text) > MAX_CELL_LENGTH:
        text = text[: MAX_CELL_LENGTH - 1] + "…"
    return text
