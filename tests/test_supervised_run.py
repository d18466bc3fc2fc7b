"""A supervised run whose process is killed ends all the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import kill_session
from small_run import long_grpo, write_recipe

from rl_algorithms.testing import weights_digest

DEADLINE_S = 240.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write_recipe(tmp_path, long_grpo())
    train = [sys.executable, "-m", "rl_cli", "train", "small.yaml"]
    with (tmp_path / "output").open("w+") as output:
        supervisor = subprocess.Popen(
            [*train, "output_dir=mine", "--supervise", "2"],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            # The stage has a checkpoint, and several steps are still to come.
            saved = tmp_path / "mine" / "stages" / "grpo" / "checkpoints" / "step_2"
            _wait_for(saved, supervisor)
            [driver] = psutil.Process(supervisor.pid).children()
            driver.kill()
            code = supervisor.wait(DEADLINE_S)
        finally:
            kill_session(supervisor)
    shown = (tmp_path / "output").read_text()
    assert code == 0, shown[-3000:]
    assert "The run was ended by SIGKILL; restarting it" in shown
    restarts = (tmp_path / "mine" / "logs" / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["ended"] for line in restarts] == ["was ended by SIGKILL"]
    done = subprocess.run(
        [*train, "output_dir=whole"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    mine, whole = (
        json.loads((tmp_path / name / "result.json").read_text())
        for name in ("mine", "whole")
    )
    assert mine["steps"] == whole["steps"] == 6
    digests = [_digest(run) for run in (mine, whole)]
    assert digests[0] == digests[1]


def _digest(result: dict[str, Any]) -> str:
    # The newest of the steps: the best one may lie before the kill.
    steps = Path(result["best_checkpoint"]).parent
    return weights_digest(steps / "step_6")


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.05)
