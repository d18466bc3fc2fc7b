"""A killed run resumes as if nothing had happened, with every algorithm.

SIGKILL leaves the run folder as it is at that moment. So one run is uninterrupted, its
folder is copied during a step, and the copy is resumed, which saves another process.
`resume_check.py` kills real processes, many times.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import resume_check
from matrix_cells import cells

import rl_algorithms as rl
from rl_distributed.testing import local_ray

NUM_STEPS = 5
# The newest checkpoint is then the one of step 2.
MOMENTS = {"grpo": "policy_training", "ppo": "generation"}


@pytest.fixture(scope="module")
def pool() -> Iterator[rl.KeptWorkers]:
    with local_ray(num_cpus=2), rl.KeptWorkers() as pool:
        yield pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resume_check.make_model(tmp_path_factory.mktemp("resume"))


class Copy(rl.Callback):
    """Copies the run folder when a phase of the fourth step begins."""

    def __init__(self, phase: str, target: Path) -> None:
        self._phase, self._target = phase, target

    def on_phase(self, trainer: Any, steps_done: int, phase: str, *where: int) -> None:
        if steps_done == 3 and phase == self._phase:
            shutil.copytree(trainer.run_dir, self._target, dirs_exist_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", cells(rl.algorithm_names(), ["grpo", "ppo", "dpo"]))
def test_goes_on_bitwise_from_what_a_kill_leaves(
    name: str, model: Path, tmp_path: Path, pool: rl.KeptWorkers
) -> None:
    copy = Copy(MOMENTS.get(name, "policy_training"), tmp_path / "killed")
    arguments: dict[str, Any] = {"num_steps": NUM_STEPS, "pool": pool}
    whole = resume_check.train(
        name, model, tmp_path / "whole", callbacks=[copy], **arguments
    )
    left = tmp_path / "killed" / "checkpoints"
    assert sorted(path.name for path in left.glob("*step_*")) == ["step_2"]
    resumed = resume_check.train(
        name, model, tmp_path / "killed", resume=True, **arguments
    )
    assert resumed.run_dir == tmp_path / "killed"
    assert resumed.steps == whole.steps == NUM_STEPS
    assert len(resumed.history) == NUM_STEPS
    assert resume_check.differences(whole, resumed) == []


class Update(rl.Callback):
    """Updates the configuration before a checkpoint, and between it and a kill."""

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        changes = {1: {"lr": 1e-3}, 3: {"lr": 6e-3, "val_period": 2}}.get(step)
        if changes is not None:
            trainer.update_config(changes, by="Update")


@pytest.mark.slow
def test_updates_before_a_kill_come_again_bitwise(
    model: Path, tmp_path: Path, pool: rl.KeptWorkers
) -> None:
    copy = Copy("policy_training", tmp_path / "killed")
    arguments: dict[str, Any] = {"num_steps": NUM_STEPS, "pool": pool}
    whole = resume_check.train(
        "grpo", model, tmp_path / "whole", callbacks=[copy, Update()], **arguments
    )
    resumed = resume_check.train(
        "grpo", model, tmp_path / "killed", resume=True, **arguments
    )
    assert resume_check.differences(whole, resumed) == []
    _, rates = resumed.history.column("train:lr")
    assert rates[:4] == [3e-3, 1e-3, 1e-3, 6e-3]
    records = [(run.run_dir / "updates.jsonl").read_text() for run in (whole, resumed)]
    assert records[0] == records[1]


def test_every_algorithm_has_a_case() -> None:
    assert set(rl.algorithm_names()) <= set(resume_check.CASES)
