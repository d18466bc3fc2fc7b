"""Durable writes, and the errors of writes that fail.

A file or a rename is durable once the file *and* its folder have been synchronised;
before that, a power cut may undo it although the program has gone on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_distributed.errors import CheckpointError
from rl_distributed.logs.logging import get_logger

__all__ = [
    "disk_is_full",
    "encode_training_info",
    "fsync_path",
    "fsync_tree",
    "read_bytes",
    "remove_leftover",
    "remove_tree",
    "write_bytes_durably",
    "write_error",
]

_logger = get_logger(__name__)

# EFBIG as well: a process's file size limit stops a write just as a full disk does.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Messages of libraries written in other languages, which lose the errno.
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


def disk_is_full(error: BaseException | None) -> bool:
    """Return whether an exception, or what caused it, is a full disk or quota."""
    seen = 0
    # Bounded, because causes may form a cycle.
    while error is not None and seen < 16:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
        seen += 1
    return False


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    except OSError:
        return "free space unknown"


def write_error(path: Path, error: BaseException, last: Path | None) -> CheckpointError:
    """Return the error to raise for a write that failed.

    Args:
        path: The checkpoint being written.
        error: Why it failed.
        last: The newest whole checkpoint, which is still there.
    """
    kept = f"the last whole checkpoint is {last}" if last else "there is no earlier one"
    if disk_is_full(error):
        why = f"the disk or quota is full ({_free_space(path.parent)})"
        remedy = (
            "free some space, keep fewer checkpoints (checkpointing.keep_top_k) or "
            "set checkpointing.checkpoint_dir to another disk"
        )
    else:
        why = str(error) or type(error).__name__
        remedy = "check that the folder exists and that you may write to it"
    return CheckpointError(
        f"checkpoint {path} cannot be written: {why}; {remedy}; {kept}"
    )


def fsync_path(path: Path) -> None:
    """Synchronise a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path) -> None:
    """Synchronise every file and folder below and including a folder, but no links."""
    # Bottom up, so that each folder is synchronised after its contents.
    for folder, _, files in os.walk(root, topdown=False):
        for path in (Path(folder, name) for name in files):
            if not path.is_symlink():
                fsync_path(path)
        fsync_path(Path(folder))


def write_bytes_durably(path: Path, data: bytes) -> None:
    """Replace a file as a whole: readers see the old content or the new one.

    Its permissions stay.
    """
    # With the process id, so that two processes never write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_path(path.parent)


def read_bytes(path: Path) -> bytes:
    """Read a file of a checkpoint.

    Raises:
        CheckpointError: The file is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint file {path} cannot be read: {error.strerror or error}"
        ) from error


def remove_tree(path: Path) -> None:
    """Remove a folder; a folder that is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def remove_leftover(path: Path) -> None:
    """Remove a folder that only takes up space; where that fails, say so and go on.

    On NFS, a file that a reader has open keeps its folder from being removed.
    """
    try:
        remove_tree(path)
    except OSError as error:
        _logger.warning("%s, which is a leftover, cannot be removed: %s", path, error)


def _plain(value: Any) -> Any:
    """Turn numbers of array libraries into plain ones."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def encode_training_info(training_info: Mapping[str, Any]) -> bytes:
    """Render the state of a training loop as JSON.

    Raises:
        CheckpointError: A value has no JSON form; the message names it.
    """
    for key, value in training_info.items():
        try:
            # One by one, so that the message can name the value.
            json.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"training_info[{key!r}] cannot be saved: {error}; keep only numbers, "
                "texts, lists and mappings there"
            ) from error
    return (json.dumps(training_info, default=_plain, indent=1) + "\n").encode()
