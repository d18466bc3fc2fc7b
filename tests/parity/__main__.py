"""Run the whole matrix and write it as a table: `python -m parity [--page FILE]`.

It ends with code 1 where a cell is outside its limits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from parity.cells import LAYOUTS, LOSSES
from parity.families import FAMILIES, build_family
from parity.measure import Difference, Matrix
from parity.ranks import RankProcesses

_HEAD = """# Parity of layouts

Each cell is a tiny model of a family, trained in a layout of the ranks and compared
with plain transformers in one process, in float32 with eager attention: the loss, the
whole gradients of the first step (each relative to the largest number of its tensor),
and the weights after three steps of SGD. A number is the worst of {losses}.
The limits are 1e-6 for the loss, 1e-5 for gradients and 1e-6 for weights. `nox -s
parity` makes this page; CI runs a part of the cells.
"""


def table(rows: Iterable[tuple[str, str, list[Difference]]]) -> str:
    """Return the page of the results."""
    lines = [
        _HEAD.format(losses=", ".join(LOSSES)),
        "| family | layout | loss | gradients | weights |",
        "|---|---|---|---|---|",
    ]
    for family, layout, found in rows:
        worst = Difference.worst(found)
        numbers = (worst.loss, worst.gradients, worst.weights)
        cells = " | ".join("0" if n == 0 else f"{n:.0e}" for n in numbers)
        lines.append(f"| {family} | {layout} | {cells} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(prog="parity", description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    rows, outside = [], 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = RankProcesses(4)
        try:
            for family in options.family or FAMILIES:
                matrix = Matrix(build_family(family, Path(folder) / family), ranks)
                for layout in LAYOUTS:
                    found = []
                    for loss in LOSSES:
                        difference = matrix.difference(layout, loss)
                        complaint = difference.complaint()
                        outside += complaint is not None
                        print(f"{family}, {layout}, {loss}: {complaint or 'equal'}")
                        found.append(difference)
                    rows.append((family, layout, found))
        finally:
            ranks.close()
    if options.page is not None:
        options.page.write_text(table(rows), encoding="utf-8")
    print(f"{len(rows) * len(LOSSES)} cells, {outside} outside their limits")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
