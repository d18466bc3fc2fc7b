"""`Snapshots`: the state of a run in the memory of its driver.

A snapshot has the files of a checkpoint, so it restores bitwise the same. It is written
to no disk that lasts, and ends with the driver: what it serves is the restart of
training workers, on whichever nodes, which lose their memory while that of the driver
stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.checkpoint.memory import (
    FolderInMemory,
    passing_folder,
    read_files,
    size_of,
)
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["Snapshot", "Snapshots"]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step."""

    info: Mapping[str, Any]
    """State of the loop, the data, the callbacks and the algorithm."""
    models: Mapping[str, FolderInMemory]
    """Weights and training state of the models that are trained, by name."""
    own: FolderInMemory
    """Files of the algorithm, as in a checkpoint."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.info["state"]["step"])


class Snapshots:
    """Takes snapshots every few steps, and holds the newest one.

    Args:
        period: Steps between snapshots; None for none.
    """

    def __init__(self, period: int | None) -> None:
        self._period = period
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
        taken = {name: model.take_snapshot() for name, model in models.items()}
        # As large as the last one, so that the folder is in memory from the second on.
        size = None if self.newest is None else size_of(self.newest.own.files)
        with passing_folder(size) as folder:
            write_own(folder)
            own = FolderInMemory(read_files(folder))
        # A deep copy: later steps change lists and dictionaries of the state in place.
        self.newest = Snapshot(copy.deepcopy(dict(info)), taken, own)

    def drop(self) -> None:
        """Release the snapshot, because a checkpoint is newer."""
        self.newest = None
