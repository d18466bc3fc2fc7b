"""Cells of a test matrix, of which CI runs a covering subset."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["cells"]


def cells(every: Iterable[Any], covering: Collection[Any]) -> list[Any]:
    """Return the values for `parametrize`; `nox -s matrix` runs the others.

    Args:
        every: A value per cell; a tuple for several parameters.
        covering: Those run by `nox -s tests`, and so by CI.

    Raises:
        ValueError: A covering cell is not among the cells.
    """
    found = list(every)
    unknown = [cell for cell in covering if cell not in found]
    if unknown:
        raise ValueError(f"covering must be cells of the matrix: got {unknown}")
    return [
        pytest.param(
            *(cell if isinstance(cell, tuple) else (cell,)),
            marks=() if cell in covering else (pytest.mark.matrix,),
        )
        for cell in found
    ]
