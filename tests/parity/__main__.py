"""Run the matrix and write it as a table: `python -m parity [--page FILE]`.

With `--family` or `--layout` only these cells run, and other rows of the page stay. It
exits with code 1 if a cell exceeds its limits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from parity.cells import LAYOUTS, LOSSES, layouts_of
from parity.families import FAMILIES, build_family
from parity.measure import Difference, Matrix
from parity.ranks import RankProcesses

_HEAD = """# Parity of layouts

Each cell is a tiny model of a family, trained in a layout of the ranks and compared
with plain transformers in one process, in float32 with eager attention: the loss, the
whole gradients of the first step (each relative to the largest number of its tensor),
and the weights after three steps of SGD. A number is the worst of {losses}. In layouts
with LoRA an adapter is trained, which peft trains in the reference too, and the weights
are merged; with "ends" the embedding and the head are trained whole beside it.
The limits are 1e-6 for the loss, 1e-5 for gradients and 1e-6 for weights. `nox -s
parity` makes this page; CI runs a part of the cells.
"""


_TAIL = """
## Cells that a CPU cannot run

No GPU has run them yet.

| cell | test, in `tests/gpu` |
|---|---|
| the layouts above over NCCL, a GPU per rank | `test_layouts_cuda.py` |
| `bfloat16`, padded and packed (flash attention) | `test_precision_cuda.py` |
| vLLM's sleep mode | `test_vllm_cuda.py` |
| CUDA IPC | `test_transfer_cuda.py`, `test_weight_sync_cuda.py` |
| context parallelism in `megatron` | none: refused |

`nox -s tests_gpu` runs them; without a GPU they are skipped. `megatron` has its cells
in `packages/rl-models/tests/test_megatron.py`, which takes the GPUs that there are.
"""


def row(family: str, layout: str, found: list[Difference]) -> str:
    """Return a line of the page."""
    worst = Difference.worst(found)
    numbers = (worst.loss, worst.gradients, worst.weights)
    cells = " | ".join("0" if n == 0 else f"{n:.0e}" for n in numbers)
    return f"| {family} | {layout} | {cells} |"


def table(rows: Mapping[tuple[str, str], str]) -> str:
    """Return the page, from its lines by family and layout."""
    lines = [
        _HEAD.format(losses=", ".join(LOSSES)),
        "| family | layout | loss | gradients | weights |",
        "|---|---|---|---|---|",
        *(
            rows[family, layout]
            for family in FAMILIES
            for layout in LAYOUTS
            if (family, layout) in rows
        ),
    ]
    return "\n".join(lines) + "\n" + _TAIL


def rows_of(page: Path) -> dict[tuple[str, str], str]:
    """Return the lines of a page, by family and layout."""
    found = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in FAMILIES:
            found[cells[0], cells[1]] = line
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(prog="parity", description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    options = parser.parse_args(arguments)
    rows: dict[tuple[str, str], str] = {}
    if options.page is not None and (options.family or options.layout):
        rows = rows_of(options.page)
    count = outside = 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = RankProcesses(4)
        try:
            for family in options.family or FAMILIES:
                matrix = Matrix(build_family(family, Path(folder) / family), ranks)
                for layout in layouts_of(family):
                    if options.layout and layout not in options.layout:
                        continue
                    found = []
                    for loss in LOSSES:
                        difference = matrix.difference(layout, loss)
                        complaint = difference.complaint()
                        outside += complaint is not None
                        print(f"{family}, {layout}, {loss}: {complaint or 'equal'}")
                        found.append(difference)
                    count += len(found)
                    rows[family, layout] = row(family, layout, found)
        finally:
            ranks.close()
    if options.page is not None:
        options.page.write_text(table(rows), encoding="utf-8")
    print(f"{count} cells, {outside} outside their limits")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
