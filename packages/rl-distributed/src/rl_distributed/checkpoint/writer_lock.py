"""The right to write to a checkpoint folder: one process, and one manager in it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Set
from pathlib import Path

from rl_distributed.errors import CheckpointError, LockHeldError
from rl_distributed.file_lock import FolderLock

__all__ = ["FolderWriter"]

_guard = threading.Lock()
# The writer of each folder in this process; weak, so that a manager that was dropped
# does not stay the writer.
_writers: weakref.WeakValueDictionary[str, FolderWriter] = weakref.WeakValueDictionary()


class FolderWriter:
    """Takes the right to write to a folder with the first checkpoint, and keeps it.

    Another process is refused until this one releases it or ends. A manager of the
    same process is given it while no checkpoint is begun here, as after a training
    loop that is run again in a notebook.

    Args:
        folder: The folder of the steps.
        begun: Checkpoints that are begun and not finished; the caller changes it.
    """

    def __init__(self, folder: Path, begun: Set[Path]) -> None:
        self._folder = folder
        self._begun = begun
        self._lock = FolderLock(folder, "writing checkpoints", name="writer")

    def claim(self) -> None:
        """Become the writer, or make sure that one still is.

        Raises:
            CheckpointError: Another one writes there; the message names its process.
            OSError: The folder cannot be written.
        """
        # Two paths may lead to the same folder.
        key = os.path.realpath(self._folder)
        with _guard:
            if self._lock.is_held:
                return
            other = _writers.get(key)
            if other is not None and not other._begun:
                other._lock.release()
            try:
                self._lock.acquire()
            except LockHeldError as error:
                raise CheckpointError(
                    f"checkpoints in {self._folder} are written by {error.owner}, and "
                    "a second writer would destroy them; end that one first, or set "
                    "checkpointing.checkpoint_dir to another folder"
                ) from error
            _writers[key] = self

    def release(self) -> None:
        """Let others write."""
        with _guard:
            self._lock.release()
