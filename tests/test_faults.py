"""Kills, signals and full disks in whole runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import is_running, kill_session, session_processes
from safetensors.torch import load_file
from small_run import long_grpo, write_recipe

DEADLINE_S = 280.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with its name when it does not come."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)  # a poll, not the condition


def model_weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "stages" / "grpo" / "checkpoints" / f"step_{step}"
    return load_file(folder / "policy" / "weights" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed_equals_never_killed_bitwise(
    start: Callable[..., subprocess.Popen[str]],
    rl: Callable[..., Any],
    whole_run: Any,
    tmp_path: Path,
) -> None:
    path = write_recipe(tmp_path, long_grpo())
    whole, broken = Path(whole_run.json["run_dir"]), tmp_path / "broken"
    process = start("train", path, f"output_dir={broken}")
    first = broken / "stages" / "grpo" / "checkpoints" / "step_2"
    wait_until(lambda: first.exists() or process.poll() is not None, "step 2")
    kill_session(process)
    process.wait(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    last = broken / "stages" / "grpo" / "checkpoints" / "step_6"
    assert not last.exists()

    done = rl("train", path, "--resume", str(broken))
    assert done.code == 0, done.err
    expected, found = model_weights(whole, 6), model_weights(broken, 6)
    assert set(expected) == set(found)
    different = [n for n in expected if not torch.equal(expected[n], found[n])]
    assert different == []


def has_loaded(process: subprocess.Popen[str], library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


def has_started(process: subprocess.Popen[str], name: str) -> bool:
    for other in session_processes(process):
        with contextlib.suppress(psutil.Error):
            if name in other.name():
                return True
    return False


def has_checkpoint(out: Path, stage: str) -> bool:
    # Whichever: the first ones are removed soon.
    return any((out / "stages" / stage / "checkpoints").glob("step_*"))


# When Ctrl-C is pressed, and the stage that has a checkpoint then.
MOMENTS: dict[str, tuple[Callable[[Path, subprocess.Popen[str]], bool], str]] = {
    "start": (lambda out, process: (out / "run.json").exists(), ""),
    "imports": (lambda out, process: has_loaded(process, "libtorch"), ""),
    "Ray": (lambda out, process: has_started(process, "raylet"), ""),
    "warm-up": (lambda out, process: has_checkpoint(out, "warmup"), "warmup"),
    "GRPO": (lambda out, process: has_checkpoint(out, "grpo"), "grpo"),
}


def train_for_long(
    moment: str, start: Callable[..., subprocess.Popen[str]], folder: Path
) -> subprocess.Popen[str]:
    """Start a run that is still in the stage of its moment when that comes."""
    folder.mkdir()
    data = long_grpo(max_num_steps=4000)
    steps = 4 if moment == "GRPO" else 4000
    data["stages"]["warmup"]["sft"]["max_num_steps"] = steps
    path = write_recipe(folder, data)
    return start("train", path, f"output_dir={folder / 'out'}", env=os.environ)


def check_interrupted(moment: str, process: subprocess.Popen[str], out: Path) -> None:
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, f"{moment}: {err}"
    assert "nterrupted" in err, moment
    assert "Traceback" not in err, moment
    stage = MOMENTS[moment][1]
    if stage:
        assert "step_" in err, moment
        assert (out / "stages" / stage / "checkpoints").is_dir()
    wait_until(
        lambda: not any(map(is_running, session_processes(process))),
        f"the last process to end ({moment})",
    )


# Runs of one group go side by side, which saves time; their moments come in this order.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "moments", [("start", "imports", "Ray"), ("warm-up", "GRPO")], ids=", ".join
)
def test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process(
    moments: tuple[str, ...],
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    runs = {m: train_for_long(m, start, tmp_path / m) for m in moments}
    for moment, process in runs.items():
        has_come, out = MOMENTS[moment][0], tmp_path / moment / "out"
        wait_until(
            lambda has_come=has_come, process=process, out=out: (  # type: ignore[misc]
                process.poll() is not None or has_come(out, process)
            ),
            moment,
        )
        assert process.poll() is None, f"{moment}: {process.communicate()[1]}"
        process.send_signal(signal.SIGINT)
    for moment, process in runs.items():
        check_interrupted(moment, process, tmp_path / moment / "out")


def test_every_moment_has_its_turn(request: pytest.FixtureRequest) -> None:
    function = request.module.test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process
    (groups,) = [m.args[1] for m in function.pytestmark if m.name == "parametrize"]
    assert [moment for group in groups for moment in group] == list(MOMENTS)
