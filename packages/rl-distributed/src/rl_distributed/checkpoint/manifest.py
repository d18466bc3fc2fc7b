"""The manifest: the list of files of a whole checkpoint.

`manifest.json` is written last and lists every other file with its size and SHA-256
digest. A folder without one is no checkpoint, and one whose files differ is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rl_distributed.checkpoint.storage import read_bytes, write_bytes_durably
from rl_distributed.errors import CheckpointError

__all__ = ["MANIFEST_NAME", "FileEntry", "read_manifest", "verify", "write_manifest"]

MANIFEST_NAME = "manifest.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink():
                raise CheckpointError(
                    f"checkpoint {root} holds a link, {path.relative_to(root)}: its "
                    "target may change or go; copy the file instead"
                )
        paths.extend(Path(folder, name) for name in files)
    return sorted(path for path in paths if path != root / MANIFEST_NAME)


def write_manifest(root: Path) -> dict[str, FileEntry]:
    """Write the manifest of a folder whose files are complete and durable.

    Raises:
        CheckpointError: The folder holds a symbolic link.
        OSError: The manifest cannot be written.
    """
    entries = {
        path.relative_to(root).as_posix(): FileEntry(path.stat().st_size, _digest(path))
        for path in _list_files(root)
    }
    record = {
        "version": _VERSION,
        "files": {
            name: {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
            for name, entry in entries.items()
        },
    }
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    write_bytes_durably(root / MANIFEST_NAME, text.encode())
    return entries


def _parse_entry(root: Path, name: str, raw: Any) -> FileEntry:
    path = PurePosixPath(name)
    # A manifest from elsewhere could otherwise make us read any file.
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"checkpoint {root}: its manifest names a file outside of it, {name!r}"
        )
    if not isinstance(raw, dict):
        raise CheckpointError(f"checkpoint {root}: its manifest is damaged at {name!r}")
    size_bytes, sha256 = raw.get("size_bytes"), raw.get("sha256")
    if not isinstance(size_bytes, int) or not isinstance(sha256, str):
        raise CheckpointError(f"checkpoint {root}: its manifest is damaged at {name!r}")
    return FileEntry(size_bytes, sha256)


def read_manifest(root: Path) -> dict[str, FileEntry]:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: The manifest is missing or damaged, or of a newer version.
    """
    path = root / MANIFEST_NAME
    if not root.is_dir():
        raise CheckpointError(f"checkpoint {root} does not exist")
    if not path.exists():
        raise CheckpointError(
            f"checkpoint {root} is incomplete: it has no {MANIFEST_NAME}; use another"
        )
    try:
        record = json.loads(read_bytes(path))
        version, files = record["version"], dict(record["files"])
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {root}: {path.name} is damaged") from error
    if version != _VERSION:
        raise CheckpointError(
            f"checkpoint {root} has format {version!r}; this release reads {_VERSION}"
        )
    return {name: _parse_entry(root, name, raw) for name, raw in files.items()}


def verify(root: Path, *, digests: bool = True) -> None:
    """Check that a checkpoint is whole; files that it does not list are allowed.

    Args:
        root: The folder of the checkpoint.
        digests: Compare contents too, which reads every file.

    Raises:
        CheckpointError: It is incomplete or damaged; the message names the file.
    """
    for name, entry in read_manifest(root).items():
        path = root / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {root} is damaged: {name} is missing")
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            raise CheckpointError(
                f"checkpoint {root} is damaged: {name} has {size_bytes} bytes, "
                f"expected {entry.size_bytes}"
            )
        try:
            same = not digests or _digest(path) == entry.sha256
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {root}: {name} cannot be read: {error.strerror}"
            ) from error
        if not same:
            raise CheckpointError(
                f"checkpoint {root} is damaged: the content of {name} has changed "
                "since it was written"
            )
