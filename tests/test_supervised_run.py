"""A supervised run whose process is killed ends all the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import kill_session
from small_run import recipe, write_recipe

DEADLINE_S = 240.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_driver_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write_recipe(tmp_path, recipe())
    command = ["train", "small.yaml", "output_dir=mine", "--supervise", "2"]
    with (tmp_path / "output").open("w+") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "rl_cli", *command],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            # The first stage has ended, so the run has something to go on from.
            _wait_for(tmp_path / "mine" / "stages" / "warmup.json", supervisor)
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
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["steps"] == 4


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.05)
