"""Folders and files that only their owner can read.

Logs, samples and weights of a run are nobody else's business on a shared machine. What
is there already keeps the permissions that somebody gave it, such as a folder that a
group shares.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

__all__ = ["create_private_folder", "private_opener", "write_private_text"]


def create_private_folder(path: Path, *, is_new: bool = False) -> None:
    """Make a folder for its owner alone; folders above it are made as usual.

    Args:
        path: The folder; one that is there stays as it is.
        is_new: It must not be there.

    Raises:
        FileExistsError: It is there and must not be, or it is a file.
        NotADirectoryError: The one above it is a file.
        OSError: It cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        above = str(path.parent)
        raise NotADirectoryError(
            errno.ENOTDIR, os.strerror(errno.ENOTDIR), above
        ) from error
    # Only this folder is made private: those above may belong to a shared tree.
    path.mkdir(mode=stat.S_IRWXU, exist_ok=not is_new)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=...)`; one that is made is its owner's."""
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)


def write_private_text(path: Path, text: str) -> None:
    """Write a file for its owner alone, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Private from its creation; a chmod afterwards would leave it
        # readable for a moment.
        with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
