"""Names in a checkpoint folder, and recovery of what a killed process left there.

```
checkpoint_dir/
  step_10/            complete, by its manifest
  tmp_step_20/        being written
  old_step_10/        replaced by a new step_10 in this moment
  removed_step_5/     being deleted
  .writer.lock        held by the process that writes here
```
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from rl_distributed.checkpoint.storage import remove_leftover
from rl_distributed.errors import CheckpointError

__all__ = ["StepFolders"]

# No leading zeros: a folder found as a step must be where that step is looked up.
_FOLDER = re.compile(
    r"(?P<prefix>|tmp_|old_|removed_)step_(?P<step>0|[1-9][0-9]*)", re.ASCII
)


class StepFolders:
    """The step folders below one folder.

    Args:
        root: The folder; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def final(self, step: int) -> Path:
        """Return the path of the valid checkpoint of a step."""
        return self.root / f"step_{step}"

    def being_written(self, step: int) -> Path:
        """Return the path at which a step is written."""
        return self.root / f"tmp_step_{step}"

    def replaced(self, step: int) -> Path:
        """Return the path of a step while a new one of the same number replaces it."""
        return self.root / f"old_step_{step}"

    def removed(self, step: int) -> Path:
        """Return the path of a step while it is deleted."""
        return self.root / f"removed_step_{step}"

    def step_being_written(self, path: Path) -> int:
        """Return the step of a folder that is being written.

        Raises:
            CheckpointError: It is another folder, or gone.
        """
        match = _FOLDER.fullmatch(path.name)
        if match is None or path != self.being_written(int(match["step"])):
            raise CheckpointError(
                f"{path} was not made by init_tmp_checkpoint; it cannot be finalized"
            )
        if not path.is_dir():
            raise CheckpointError(f"checkpoint {path} is gone; begin it again")
        return int(match["step"])

    def _all(self) -> list[tuple[Path, str, int]]:
        try:
            paths = [path for path in self.root.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder {self.root} cannot be read: {error.strerror}"
            ) from error
        matches = [(path, _FOLDER.fullmatch(path.name)) for path in paths]
        return [(path, m["prefix"], int(m["step"])) for path, m in matches if m]

    def candidates(self) -> dict[int, Path]:
        """Folders that may hold a step, oldest first.

        A replaced one counts where its replacement never came.
        """
        found: dict[int, Path] = {}
        for path, prefix, step in self._all():
            if prefix == "" or (prefix == "old_" and step not in found):
                found[step] = path
        return dict(sorted(found.items()))

    def remove_leftovers(self, in_use: Collection[Path]) -> None:
        """Remove leftovers of a killed process; restore a step it was replacing."""
        for path, prefix, step in self._all():
            if path in in_use:
                continue
            # The process was killed between two renames, and this is the only copy.
            if prefix == "old_" and not self.final(step).exists():
                path.rename(self.final(step))
            elif prefix:
                remove_leftover(path)
