"""Comparison of replayed models with a checkpoint of the run, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rl_algorithms.replay.result import ReplayDifference
from rl_models.checkpoint.comparison import compare_tensors

__all__ = ["compare_with_checkpoint"]


def compare_with_checkpoint(
    step: int, checkpoint: Path, saved: Path, models: Iterable[str]
) -> tuple[int, ReplayDifference | None]:
    """Compare weights and training state, bit by bit.

    Args:
        step: Step of the checkpoint.
        checkpoint: The run's checkpoint.
        saved: Folder of the same form with the replayed models.
        models: Names of the models.

    Returns:
        Number of compared tensors, and the first that differs.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    num_tensors = 0
    for name in models:
        for part in ("weights", "optimizer"):
            theirs = checkpoint / name / part
            if not theirs.is_dir():  # saved without the training state
                continue
            found = compare_tensors(theirs, saved / name / part)
            num_tensors += found.num_tensors
            for other in found.differences:
                # Sampling may draw from it as well; in training only dropout does,
                # which would show in the losses.
                if other.name.startswith("random"):
                    continue
                what = f"tensor {other.name} of {name}/{part}"
                replayed = other.second
                if other.num_elements:
                    replayed += (
                        f" with {other.num_elements} other elements, which differ by "
                        f"{other.largest} at most"
                    )
                return num_tensors, ReplayDifference(step, what, other.first, replayed)
    return num_tensors, None
