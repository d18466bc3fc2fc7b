"""The example of two isolated actors runs unchanged, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "isolated_pipeline.py"
# `tools/wheels.py` runs the examples with a wheel's installation alone.
PYTHON = os.environ.get("RL_EXAMPLE_PYTHON", sys.executable)


@pytest.mark.slow
def test_isolated_pipeline(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PYTHON, EXAMPLE],
        cwd=tmp_path,
        env={**os.environ, "RL_ENV_ROOT": str(tmp_path / "environments")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Normalizer runs with textops 1.0" in out
    assert "LetterCounter runs with textops 2.0" in out
    assert "6 vowels: to be, or not to be" in out
