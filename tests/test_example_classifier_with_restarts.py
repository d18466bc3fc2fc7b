"""The example of training with restarts ends as documented."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "classifier_with_restarts.py"
# `tools/wheels.py` runs the examples with a wheel's installation alone.
PYTHON = os.environ.get("RL_EXAMPLE_PYTHON", sys.executable)


@pytest.mark.slow
def test_killed_worker_does_not_change_the_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("one worker is killed in step 37:\n")
    assert "accuracy" in before
    assert "workers [0, 1] are new; all go on from step_30" in after
    assert "in step 37: worker 1 of group 'ClassifierWorker' died" in after
    assert after.endswith("both runs end with the same weights\n")
