"""A supervised run finishes even if its process is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ahead_log import entries, trained
from matrix_cells import cells
from processes import kill_session
from small_run import long_grpo, write_recipe

from rl_algorithms.testing import weights_digest
from rl_models import ModelBuildConfig, build_model

DEADLINE_S = 240.0
TRAIN = [sys.executable, "-m", "rl_cli", "train", "small.yaml"]
NUM_STEPS, NUM_PROMPTS = 6, 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.matrix
def test_a_driver_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    write_recipe(tmp_path, long_grpo())
    mine = _killed_and_restarted(tmp_path)
    assert _digest(mine) == _digest(_undisturbed(tmp_path))


@pytest.mark.parametrize(
    ("algorithm", "max_staleness"),
    cells(
        [(name, age) for name in ("grpo", "distillation") for age in (0, 1)],
        [("grpo", 1), ("distillation", 1)],
    ),
)
def test_a_killed_asynchronous_driver_loses_and_repeats_no_prompt(
    tmp_path: Path, algorithm: str, max_staleness: int
) -> None:
    asynchronous = {"max_staleness": max_staleness, "event_log": True}
    data = long_grpo(asynchronous=asynchronous)
    stage = data["stages"]["grpo"]
    stage["policy"]["generation"] = {"backend": "huggingface"}
    if algorithm == "grpo":
        stage["loss_fn"] = {"use_importance_sampling_correction": True}
    else:
        model = ModelBuildConfig.from_dict({**data["model"], "hidden_size": 32})
        teacher = build_model(model, tmp_path / "teacher", seed=4)
        stage |= {"algorithm": algorithm, algorithm: stage.pop("grpo")}
        stage["teacher"] = {"model_name": str(teacher)}
    write_recipe(tmp_path, data)
    mine = _killed_and_restarted(tmp_path)
    logs = sorted((tmp_path / "mine").glob("stages/grpo/asynchronous/events_*.jsonl"))
    lives = [entries(path) for path in logs]
    assert len(lives) == 2, "one log of each life"
    resumed_at = lives[1][0]["state"]["step"]
    assert 0 < resumed_at < NUM_STEPS
    steps = trained(lives[0], before=resumed_at) | trained(lives[1])
    prompts = sorted(number for groups in steps.values() for number, _ in groups)
    # Dropped ones would be missing here.
    assert prompts == list(range(NUM_STEPS * NUM_PROMPTS))
    ages = [step - v for step, groups in steps.items() for _, v in groups]
    assert 0 <= min(ages) <= max(ages) <= max_staleness
    if max_staleness == 0:
        assert _digest(mine) == _digest(_undisturbed(tmp_path))


def _killed_and_restarted(folder: Path) -> dict[str, Any]:
    """Kill the driver of a supervised run; return the restarted run's result."""
    with (folder / "output").open("w+") as output:
        supervisor = subprocess.Popen(
            [*TRAIN, "output_dir=mine", "--supervise", "2"],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            # The stage has a checkpoint, and several steps remain.
            saved = folder / "mine" / "stages" / "grpo" / "checkpoints" / "step_2"
            _wait_for(saved, supervisor)
            [driver] = psutil.Process(supervisor.pid).children()
            driver.kill()
            code = supervisor.wait(DEADLINE_S)
        finally:
            kill_session(supervisor)
    shown = (folder / "output").read_text()
    assert code == 0, shown[-3000:]
    assert "The run was ended by SIGKILL; restarting it" in shown
    restarts = (folder / "mine" / "logs" / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["ended"] for line in restarts] == ["was ended by SIGKILL"]
    return _result(folder / "mine")


def _undisturbed(folder: Path) -> dict[str, Any]:
    """Run the same recipe to completion."""
    done = subprocess.run(
        [*TRAIN, "output_dir=whole"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return _result(folder / "whole")


def _result(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    assert result["steps"] == NUM_STEPS
    return result


def _digest(result: dict[str, Any]) -> str:
    # The newest of the steps: the best one may precede the kill.
    steps = Path(result["best_checkpoint"]).parent
    return weights_digest(steps / f"step_{NUM_STEPS}")


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.05)
