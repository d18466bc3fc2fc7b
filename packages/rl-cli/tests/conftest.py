"""Run folders as trainers leave them, without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles

# The browser driver is a module beside the tests.
_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.append(_TESTS)


def write_lines(
    path: Path, records: Iterable[Mapping[str, Any]], end: str = ""
) -> Path:
    """Write JSON lines, followed by what a killed writer has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return path


def write_rollouts(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write answers of training steps as a trainer does."""
    files = RolloutFiles(folder, 1 << 40)
    for record in records:
        files.add(record["step"], [{k: v for k, v in record.items() if k != "step"}])


def metric_lines(num_steps: int) -> list[dict[str, Any]]:
    """Return the lines of a short GRPO run."""
    lines: list[dict[str, Any]] = [
        {"hyperparams": {"seed": 3, "grpo": {"max_num_steps": num_steps},
                         "env": {"settings": {"api_key": "hunter2hunter2"}},
                         "mismatch": {"statistic": "p99", "limit": 1.0}}}
    ]  # fmt: skip
    for step in range(1, num_steps + 1):
        metrics = {
            "train:reward": step / num_steps,
            "train:loss": 1.0 / step,
            "train:num_dropped/stale": float(step == 2),
            "train:weight_version_min": float(step - 1),
            "train:weight_version_max": float(step - 1),
            "timing:total_step_time": 2.0,
            "timing:generation": 1.5,
            "timing:policy_training": 0.25,
        }
        if step % 5 == 0:
            metrics |= {"val:accuracy": step / (2 * num_steps), "timing:validation": 1}
        lines.append({"step": step, "time": 1.7e9 + step, "metrics": metrics})
    return lines


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the folder of a finished GRPO run."""

    def make(
        name: str = "run",
        *,
        num_steps: int = 20,
        samples: Iterable[Mapping[str, Any]] = (),
        rollouts: Iterable[Mapping[str, Any]] = (),
        logs: Iterable[Mapping[str, Any]] = (),
        finished: bool = True,
    ) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints" / "step_10").mkdir(parents=True)
        record = {"kind": "algorithm", "name": "grpo", "config": {"seed": 3},
                  "started": "2026-01-02T03:04:05+00:00",
                  "command": "rl train grpo seed=3",
                  "machine": {"cores": 2, "memory_bytes": 8 << 30, "system": "Linux",
                              "gpus": ["NVIDIA H200"] * 2},
                  "versions": {"python": "3.11.7"}}  # fmt: skip
        (folder / "run.json").write_text(json.dumps(record))
        write_lines(folder / "metrics.jsonl", metric_lines(num_steps))
        write_lines(folder / "validation_samples.jsonl", samples)
        write_rollouts(folder, rollouts)
        write_lines(folder / "logs" / "run.jsonl", logs)
        if finished:
            result = {"steps": num_steps, "wall_s": 9.5, "stop_reason": "done",
                      "best_checkpoint": f"{folder}/checkpoints/step_10",
                      "warnings": ["mind the gap"]}  # fmt: skip
            (folder / "result.json").write_text(json.dumps(result))
        return folder

    return make
