"""The folder of the server below which requests may name weights."""

from __future__ import annotations

import os
from pathlib import Path

from rl_distributed.errors import ConfigError
from rl_models.serving.errors import ApiError

__all__ = ["WeightsRoot", "within_checkpoint"]


class WeightsRoot:
    """Resolves the paths of requests, and refuses paths outside the folder.

    Links are followed before that is decided, also those of the files inside. The
    refusal is the same whether or not a file exists, so that nothing can be learned
    from it.

    Args:
        folder: The folder below which all weights lie.

    Raises:
        ConfigError: There is no such folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(
                f"weights_root must be an existing folder: got {str(folder)!r}; make "
                "it, or name the one that your training run writes checkpoints to"
            )
        self.folder = self.folder.resolve()

    def folder_of(self, path: str) -> Path:
        """Return the model folder that a request names, with all links resolved.

        Args:
            path: Absolute, or relative to the root; a checkpoint of a run is taken as
                well.

        Raises:
            ApiError: It, or a file in it, lies elsewhere.
        """
        try:
            # Checked before anything outside could be looked at.
            outer = self._inside(self.folder / path)
            folder = self._inside(Path(within_checkpoint(outer)))
            if folder.is_dir():
                for file in folder.iterdir():
                    self._inside(file)
        except (OSError, ValueError):  # too long, unreadable, or with a zero byte
            raise ApiError(
                403,
                f"The path {path!r} is refused: weights must lie below the folder that "
                "the server was started with (--weights-root), links followed. Give a "
                "path relative to it, or an absolute one within it.",
                "path_refused",
            ) from None
        return folder

    def _inside(self, path: Path) -> Path:
        resolved = Path(os.path.realpath(path))
        if not resolved.is_relative_to(self.folder):
            raise ValueError("outside of the root")
        return resolved


def within_checkpoint(path: str | os.PathLike[str]) -> str:
    """Return the model's folder within a checkpoint's, or the path itself."""
    inner = Path(path) / "policy" / "weights"
    return str(inner) if inner.is_dir() else os.fspath(path)
