"""`Snapshots`: the state of a run in the memory of its driver.

A snapshot has the files of a checkpoint, so it restores bitwise the same. It is written
to no disk that lasts, and ends with the driver: what it serves is the restart of
training workers, which lose their memory while that of the driver stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rl_distributed.checkpoint.memory import (
    Files,
    passing_folder,
    read_files,
    size_of,
    write_files,
)
from rl_distributed.logs.logging import get_logger
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["Snapshot", "Snapshots"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step."""

    info: Mapping[str, Any]
    """State of the loop, the data, the callbacks and the algorithm."""
    files: Files
    """Files of the models and of the algorithm, as in a checkpoint."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.info["state"]["step"])

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Write the files into a folder that lasts as long as the block."""
        with passing_folder(size_of(self.files)) as folder:
            write_files(folder, self.files)
            yield folder


class Snapshots:
    """Takes snapshots every few steps, and holds the newest one.

    Args:
        period: Steps between snapshots; None for none.
    """

    def __init__(self, period: int | None) -> None:
        self._period = period
        self._warned = False
        self.newest: Snapshot | None = None
        """The newest one; None without any."""

    def are_due(self, step: int) -> bool:
        """Return whether to take a snapshot after this step."""
        return self._period is not None and step % self._period == 0

    def take(
        self,
        models: Mapping[str, TrainingPolicy],
        info: Mapping[str, Any],
        write_own: Callable[[Path], None],
    ) -> None:
        """Take a snapshot of the present state, which replaces the one before.

        Args:
            models: Models that are trained, by the name of their folder.
            info: What a checkpoint would hold besides the files.
            write_own: Writes files of the algorithm into a folder.
        """
        if not all(_is_here(model) for model in models.values()):
            self._warn()
            return
        # As large as the last one, so that the folder is in memory from the second on.
        size = None if self.newest is None else size_of(self.newest.files)
        with passing_folder(size) as folder:
            for name, model in models.items():
                weights, optimizer = (
                    folder / name / "weights",
                    folder / name / "optimizer",
                )
                model.save_checkpoint(weights, optimizer, tokenizer_path=weights)
            write_own(folder)
            files = read_files(folder)
        # A deep copy: later steps change lists and dictionaries of the state in place.
        self.newest = Snapshot(copy.deepcopy(dict(info)), files)

    def drop(self) -> None:
        """Release the snapshot, because a checkpoint is newer."""
        self.newest = None

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        _logger.warning(
            "fault_tolerance.snapshot_period is without effect: snapshots need all "
            "training workers on the machine of the driver, and some run on others; a "
            "run that loses workers goes back to its newest checkpoint"
        )


def _is_here(model: TrainingPolicy) -> bool:
    """Return whether all ranks of a model run on the machine of this process."""
    here = ray.get_runtime_context().get_node_id()
    return all(seat.slot.node_id == here for seat in model.group.seats)
