"""Folders that exist for seconds, while their files are kept in memory as arrays.

```python
with passing_folder(size) as folder:
    save(folder)
    files = read_files(folder)
...
with passing_folder(size_of(files)) as folder:
    write_files(folder, files)
    load(folder)
```
A process that is killed leaves its folder behind. The next one that makes a folder on
the same machine removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rl_distributed.private_files import create_private_folder

__all__ = ["Files", "passing_folder", "read_files", "size_of", "write_files"]

Files = Mapping[str, NDArray[np.uint8]]
"""Content of each file, by its path within the folder."""

_SHARED_MEMORY = Path("/dev/shm")
_NAME = "rl-snapshot-"


@contextmanager
def passing_folder(num_bytes: int | None) -> Iterator[Path]:
    """Make a folder for a block: in memory if its files fit there, or for temporaries.

    Args:
        num_bytes: Size of the files to come; None if it is not known.
    """
    root = Path(tempfile.gettempdir())
    if num_bytes is not None and _has_room(_SHARED_MEMORY, num_bytes):
        root = _SHARED_MEMORY
    _remove_left(root)
    folder = root / f"{_NAME}{os.getpid()}-{uuid.uuid4().hex}"
    create_private_folder(folder, is_new=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(root: Path, num_bytes: int) -> bool:
    # At most half of what is free, because Ray has its object store there as well.
    return os.access(root, os.W_OK) and shutil.disk_usage(root).free // 2 >= num_bytes


def _remove_left(root: Path) -> None:
    """Remove the folders of processes that have ended."""
    for folder in root.glob(f"{_NAME}*-*"):
        pid = folder.name.removeprefix(_NAME).partition("-")[0]
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


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
