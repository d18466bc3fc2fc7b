"""Owners of the sessions of local clusters, and removal of dead sessions.

Ray keeps the folder of every session for good. A process that starts a cluster holds a
lock in the session's folder, for as long as it lives; a session whose lock nobody holds
is dead. Folders without such a lock are other programs' and stay.

```
ray-1000/ray/session_<time>_<process>/rl-owner.lock
```
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from os import getpid
from pathlib import Path

import psutil

from rl_distributed.errors import LockHeldError
from rl_distributed.file_lock import FileLock, is_locked

__all__ = ["owned_session", "prune_sessions", "release_sessions"]

NUM_KEPT = 3
"""Number of dead sessions that are kept, the newest, for their logs."""
_LOCK = "rl-owner.lock"
_held: list[FileLock] = []


@contextmanager
def owned_session(folder: Path) -> Iterator[None]:
    """Own the sessions that this process begins in the block, failed ones included.

    Args:
        folder: Folder of the sessions.
    """
    before = set(_own_sessions(folder))
    try:
        yield
    finally:
        for session in set(_own_sessions(folder)) - before:
            # A disk without locks, or that is full: the session stays, nothing else.
            with suppress(OSError, LockHeldError):
                _own(session)


def release_sessions() -> None:
    """Give the sessions of this process back: its cluster has ended."""
    while _held:
        _held.pop().release()


def prune_sessions(folder: Path, num_kept: int = NUM_KEPT) -> list[Path]:
    """Remove the sessions whose process has ended, except the newest.

    Args:
        folder: Folder of the sessions.
        num_kept: Number of dead sessions to keep.

    Returns:
        The folders that were removed.
    """
    # A name begins with the time of the start.
    dead = sorted(
        session for session in folder.glob("session_*_*") if _is_dead(session)
    )
    old = dead[: max(len(dead) - num_kept, 0)]
    in_use = _named_by_processes({session.name for session in old})
    removed = [session for session in old if session.name not in in_use]
    for session in removed:
        shutil.rmtree(session, ignore_errors=True)
    return removed


def _own_sessions(folder: Path) -> list[Path]:
    return list(folder.glob(f"session_*_{getpid()}"))


def _own(session: Path) -> None:
    # The name under which others look appears when the lock is held already.
    hidden = session / f"{_LOCK}.part"
    lock = FileLock(hidden, "the owner of a session of Ray", mode=0o600)
    lock.acquire()
    hidden.rename(session / _LOCK)
    _held.append(lock)


def _is_dead(session: Path) -> bool:
    lock = session / _LOCK
    try:
        return (
            not session.is_symlink()
            and lock.is_file()
            and not lock.is_symlink()
            and not is_locked(lock)
        )
    except OSError:
        return False


def _named_by_processes(names: Collection[str]) -> set[str]:
    """Return the sessions that processes of Ray still run in, their owner gone."""
    if not names:
        return set()
    found = set()
    for process in psutil.process_iter():
        # Processes may end meanwhile, and those of other users cannot be inspected.
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            found |= {name for name in names if name in command}
    return found
