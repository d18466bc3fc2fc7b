"""Folders that exist for seconds, while their files are kept in memory as arrays.

```python
with passing_folder(size) as folder:
    save(folder)
    kept = FolderInMemory(read_files(folder))
...
# In any process on any machine that `kept` is sent to:
with kept.opened() as folder:
    load(folder)
```
A folder is locked by those who use it, and the lock ends with a process, however that
ends. What a process that was killed has left is removed by the next one that makes a
folder on the same machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rl_distributed.private_files import create_private_folder

__all__ = [
    "Files",
    "FolderInMemory",
    "passing_folder",
    "read_files",
    "size_of",
    "write_files",
]

Files = Mapping[str, NDArray[np.uint8]]
"""Content of each file, by its path within the folder."""

_SHARED_MEMORY = Path("/dev/shm")
_NAME = "rl-snapshot-"
_COMPLETE = ".complete"


@dataclass(frozen=True)
class FolderInMemory:
    """Files that become a folder wherever they are needed.

    Processes of one machine that open it at the same time share one folder.
    """

    files: Files
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of the folder; equal only if the files are."""

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Provide the files as a folder for a block; the last to leave removes it."""
        name = f"{_NAME}{self.key}"
        # Where another process has it already: it may have taken the last room.
        found = next((root for root in _roots() if (root / name).exists()), None)
        root = found or _root_for(size_of(self.files))
        _remove_left(root, besides=name)
        folder = root / name
        lock = self._written(folder)
        try:
            yield folder
        finally:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _written(self, folder: Path) -> int:
        """Write the folder, unless it is there; return a lock shared by its users."""
        complete = folder / _COMPLETE
        while True:
            lock = _locked(folder, fcntl.LOCK_SH)
            if complete.exists():
                return lock
            try:
                # One writes while the others wait here, but not if it dies; whoever
                # calls these processes has a deadline for all of it.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_of(lock, folder) and not complete.exists():
                    write_files(folder, self.files)
                    complete.touch()
            finally:
                os.close(lock)


@contextmanager
def passing_folder(num_bytes: int | None) -> Iterator[Path]:
    """Make a folder for a block: in memory if its files fit there, or for temporaries.

    Args:
        num_bytes: Size of the files to come; None if it is not known.
    """
    root = _root_for(num_bytes)
    _remove_left(root)
    folder = root / f"{_NAME}{os.getpid()}-{uuid.uuid4().hex}"
    lock = _locked(folder, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _roots() -> tuple[Path, Path]:
    return _SHARED_MEMORY, Path(tempfile.gettempdir())


def _root_for(num_bytes: int | None) -> Path:
    memory, temporary = _roots()
    if num_bytes is not None and _has_room(memory, num_bytes):
        return memory
    return temporary


def _has_room(root: Path, num_bytes: int) -> bool:
    # At most half of what is free, because Ray has its object store there as well.
    return os.access(root, os.W_OK) and shutil.disk_usage(root).free // 2 >= num_bytes


def _locked(folder: Path, kind: int) -> int:
    """Make a folder if it is not there, and lock it; return the lock."""
    while True:
        # `exist_ok` raises if another removes the folder at this moment.
        with suppress(FileExistsError):
            create_private_folder(folder)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, kind)
        # It may have been taken for one that was left, and removed.
        if _is_of(lock, folder):
            return lock
        os.close(lock)


def _is_of(lock: int, folder: Path) -> bool:
    """Return whether a lock is that of the folder of this name."""
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _remove_left(root: Path, besides: str = "") -> None:
    """Remove the folders that no process has a lock of."""
    for folder in root.glob(f"{_NAME}*"):
        if folder.name == besides:
            continue
        # Gone meanwhile, or somebody else's.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def read_files(folder: Path) -> dict[str, NDArray[np.uint8]]:
    """Return the content of all files in a folder and the folders in it."""
    return {
        str(path.relative_to(folder)): np.fromfile(path, dtype=np.uint8)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Files) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.tofile(path)


def size_of(files: Files) -> int:
    """Return the number of bytes in files."""
    return sum(content.nbytes for content in files.values())
