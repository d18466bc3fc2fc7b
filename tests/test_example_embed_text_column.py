"""The example of an embedded text column runs unchanged, in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "embed_text_column.py"
# `tools/wheels.py` runs the examples with a wheel's installation alone.
PYTHON = os.environ.get("RL_EXAMPLE_PYTHON", sys.executable)


def test_embed_text_column(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PYTHON, EXAMPLE, "5001"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert re.search(r"embedded 5001 texts in 128 dimensions", out)
    assert "rows by worker: 2501, 2500" in out
    # The query's words, not its position in the column, decide the neighbours.
    first, second = out.split("closest to")[1:]
    assert all(
        "a small dog sings loudly on the roof" in line for line in rows_of(first)
    )
    assert all("an old sailor counts the stars" in line for line in rows_of(second))


def rows_of(answer: str) -> list[str]:
    rows = answer.strip().splitlines()[1:]
    assert len(rows) == 3
    return rows
