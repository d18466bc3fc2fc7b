"""Ray's own processes are killed in whole runs."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from matrix_cells import cells
from processes import is_running, session_processes
from small_run import long_grpo, write_recipe

DEADLINE_S = 280.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with its name if it never holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)  # a poll, not the condition


def only_process(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """Return the only process of this name that a run has started."""
    found = []
    for other in session_processes(process):
        with contextlib.suppress(psutil.Error):
            if other.name() == name:
                found.append(other)
    (only,) = found
    return only


def last_step(out: Path) -> int:
    """Return the last step that a run has recorded."""
    lines = (out / "stages" / "grpo" / "metrics.jsonl").read_text().splitlines()
    return max(json.loads(line).get("step", 0) for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cells(["gcs_server", "raylet"], ["raylet"]))
def test_the_loss_of_a_process_of_ray_ends_a_run_in_plain_words(
    name: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    data = long_grpo(max_num_steps=4000)
    # Rarely, so that the step reached has only the checkpoint that was requested.
    data["stages"]["grpo"]["checkpointing"]["save_period"] = 3
    path = write_recipe(tmp_path, data)
    out = tmp_path / "out"
    process = start("train", path, f"output_dir={out}")
    checkpoints = out / "stages" / "grpo" / "checkpoints"
    wait_until(
        lambda: process.poll() is not None or any(checkpoints.glob("step_*")),
        "a checkpoint",
    )
    assert process.poll() is None, process.communicate()[1]
    killed = only_process(process, name)
    killed.kill()
    _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 1, err
    error = err[err.index("Error: the Ray cluster is lost: ") :]
    assert f"({name}, pid {killed.pid}, cluster 127.0.0.1:" in error
    assert "was ended by SIGKILL" in error
    assert "policy worker" not in error
    kept = re.search(
        r"checkpoint(?: is that)? of step (\d+),.* in (/\S+/step_\d+)", err
    )
    assert kept is not None, err
    assert Path(kept[2]) == checkpoints / f"step_{kept[1]}"
    assert Path(kept[2]).is_dir()
    if name == "gcs_server":
        # The workers could still write it.
        assert f"The checkpoint of step {last_step(out)}, the last one done" in error
    command = next(line for line in err.splitlines() if "Continue with: " in line)
    words = shlex.split(command.partition("Continue with: ")[2])
    assert words == ["rl", "train", path, "--resume", str(out)]
    wait_until(
        lambda: not any(map(is_running, session_processes(process))),
        "the last process to end",
    )
