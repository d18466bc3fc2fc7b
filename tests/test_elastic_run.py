"""Whole runs, and environments, on nodes that come and go."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ahead_log import entries, trained
from processes import kill_session
from small_run import long_grpo, write_recipe

TESTS = Path(__file__).parent
DEADLINE_S = 600.0
LOST = r"training workers are lost in step (\d+), .* goes back to step (\d+): (.*)"


def run_script(name: str, *arguments: str) -> dict[str, Any]:
    """Run a script in a session of its own; return the object that it prints."""
    process = subprocess.Popen(
        [sys.executable, str(TESTS / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        kill_session(process)
    assert process.returncode == 0, f"{name} failed\n{out}\n{err}"
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_a_run_uses_the_nodes_that_there_are(
    tmp_path: Path, max_staleness: int | None
) -> None:
    data = long_grpo(max_num_steps=4000)
    if max_staleness is not None:
        stage = data["stages"]["grpo"]
        ahead = {"max_staleness": max_staleness, "event_log": True}
        stage["grpo"]["asynchronous"] = ahead
        stage["loss_fn"] = {"use_importance_sampling_correction": True}
        stage["policy"]["generation"] = {"backend": "huggingface"}
    # On nodes of one CPU each; the environment needs none of its own.
    data["common"]["cluster"] |= {"num_nodes": 2, "min_nodes": 1}
    data["common"]["env"]["num_cpus"] = 0
    data["common"]["fault_tolerance"] = {"on_node_lost": "shrink", "snapshot_period": 1}
    data["stages"]["grpo"]["checkpointing"] = {"save_period": 3}
    found = run_script("elastic_run.py", str(tmp_path), write_recipe(tmp_path, data))

    # It took steps with one rank, with two, with one again, and with two again.
    assert found["alone"] < found["grown"] < found["shrunk"] < found["grown_again"]
    assert found["code"] == 130, found["console"]
    # Snapshots hold what ranks on two nodes had: only the step that failed is repeated,
    # and the one before it if its snapshot was what failed.
    lost, back, cause = re.search(LOST, found["log"]).groups()
    most = 1 if "(method 'train' of" in cause else 2
    assert int(lost) - most <= int(back) < int(lost), cause
    # No step is missing, and it went back only to a step that was kept.
    steps = found["steps"]
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    assert steps == sorted(steps)
    assert found["log"].count("training goes on with 1 of 2 ranks") == 2
    assert "the run is saved in" in found["console"]
    if max_staleness is not None:
        check_prompts(tmp_path / "out" / "stages" / "grpo", max(steps), max_staleness)


def check_prompts(stage: Path, num_steps: int, max_staleness: int) -> None:
    """Check that each prompt counts once, although trainers came and went."""
    (log,) = map(entries, (stage / "asynchronous").glob("events_*.jsonl"))
    by_step = trained(log, before=num_steps)
    assert sorted(by_step) == list(range(num_steps))
    ages = [step - old for step, groups in by_step.items() for _, old in groups]
    assert 0 <= min(ages) <= max(ages) == max_staleness
    saved = stage / "checkpoints" / f"step_{num_steps}" / "training_info.json"
    ahead = json.loads(saved.read_text())["own"]["asynchronous"]
    prompts = [number for groups in by_step.values() for number, _ in groups]
    prompts += [group["prompt"] for group in ahead["groups"]]
    assert sorted(prompts) == list(range(ahead["position"]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rows_of_a_worker_without_a_node_go_to_the_others() -> None:
    found = run_script("elastic_environment.py")
    rewards = [1.0, 2.0, 3.0, 4.0]
    assert found["before"] == rewards
    assert found["after"] == rewards
    assert found["without"] == [rewards, 1]
    assert found["back"] == rewards
