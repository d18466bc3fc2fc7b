"""`check_trainer`: conformance check of a trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.run.result import TrainResult
from rl_algorithms.trainers.run.resume import Resume
from rl_algorithms.trainers.trainer_interface import RunningTrainer

__all__ = ["check_trainer", "weights_digest"]


def weights_digest(checkpoint: Path) -> str:
    """Return a digest of all weight files of a checkpoint, including a critic's."""
    digest = hashlib.sha256()
    # Sorted, as glob has no order and the digest depends on it.
    for path in sorted(checkpoint.glob("*/weights/**/*")):
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _Order(Callback):
    """Records the order of the paired hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_begin(self, trainer: RunningTrainer, step: int) -> None:
        self.calls.append("train_begin")

    def on_train_end(self, trainer: RunningTrainer, step: int) -> None:
        self.calls.append("train_end")

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        self.calls.append("step_begin")

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Any) -> None:
        self.calls.append("step_end")


def check_trainer(
    make: Callable[[int, Path], BaseTrainer[Any]],
    fit: Callable[[BaseTrainer[Any], list[Callback], Resume], TrainResult],
    folder: Path,
    *,
    num_steps: int = 2,
) -> None:
    """Check that a trainer trains, calls its hooks, and resumes bitwise.

    Args:
        make: Function of a number of steps and an output folder that returns a trainer.
        fit: Function that calls the trainer's `fit` with these callbacks and `resume`.
        folder: An empty folder for the runs.
        num_steps: Number of steps before the interruption, and again after it.

    Raises:
        AssertionError: The trainer violates a rule; the message says which.
    """
    order = _Order()
    whole = fit(make(2 * num_steps, folder / "whole"), [order], False)
    steps = ["step_begin", "step_end"] * (2 * num_steps)
    assert order.calls == ["train_begin", *steps, "train_end"], (
        f"hooks must come in pairs, once per step: got {order.calls}"
    )
    assert whole.steps == 2 * num_steps, (
        f"the run must take {2 * num_steps} steps: it took {whole.steps}"
    )
    fit(make(num_steps, folder / "parts"), [], False)
    parts = fit(make(2 * num_steps, folder / "parts"), [], True)
    assert whole.checkpoint_path is not None, "the run must leave a checkpoint"
    assert parts.checkpoint_path is not None, "a resumed run must leave a checkpoint"
    assert weights_digest(parts.checkpoint_path) == weights_digest(
        whole.checkpoint_path
    ), (
        f"{2 * num_steps} steps and {num_steps} steps, resumed, must give the same "
        "weights: derive every seed from the run's seed and the step"
    )
    assert _of_training(parts) == _of_training(whole), (
        "a resumed run must have the metrics of the unbroken one"
    )


def _of_training(result: TrainResult) -> list[dict[str, float]]:
    return [
        {key: value for key, value in record.items() if key.startswith("train:")}
        for record in result.history
    ]
