"""Locks between processes: one builder per environment, and who uses one.

Both are held by an open file, so the kernel gives them back when their holder ends, in
whatever way.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from rl_distributed.errors import DeadlineExceededError

__all__ = ["FileLock", "is_locked"]

_PAUSE_S = 0.05


class FileLock:
    """An exclusive lock, waited for until a deadline.

    Args:
        path: the file that is locked; made if it is not there, and never removed,
            because another process may be waiting at it.
        deadline_s: how long to wait for it.
        what: what it protects, for the message.

    Raises:
        DeadlineExceededError: on entering, when another process holds it for too long;
            the message names that process.
    """

    def __init__(self, path: Path, deadline_s: float, what: str) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._what = what
        self._descriptor = -1

    def __enter__(self) -> FileLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._wait()
            note = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, note.encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _wait(self) -> None:
        end = time.monotonic() + self._deadline_s
        pause = threading.Event()
        while not _try_lock(self._descriptor):
            if time.monotonic() >= end:
                raise DeadlineExceededError(
                    f"waited {self._deadline_s:g} s for {self._what}: "
                    f"{self._holder()} holds {self._path}; wait for that process or "
                    "end it, or raise build_deadline_s"
                )
            pause.wait(_PAUSE_S)

    def _holder(self) -> str:
        try:
            note = json.loads(os.pread(self._descriptor, 4_096, 0))
            return f"process {note['pid']} on {note['host']}"
        except (ValueError, KeyError):
            return "another process"


def is_locked(path: Path) -> bool:
    """Whether any process holds a lock on `path`, shared or not."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
