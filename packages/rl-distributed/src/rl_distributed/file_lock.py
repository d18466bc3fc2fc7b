"""Locks between processes that end with their holder.

`FileLock` guards a short section or a build; `FolderLock` gives a folder one owner for
as long as that lives. Both are held by an open file, so the kernel frees them when the
process ends, in whatever way, and a forked child never keeps one.

Where they hold:

| file system | `FileLock` | `FolderLock` |
|---|---|---|
| local; also between containers of one machine | yes | yes |
| locks kept by a server: NFS 4, NFS 3 with lockd, CephFS, GPFS, Lustre with `flock` \
| between machines too | between machines too |
| locks of one machine only: NFS with `local_lock` or `nolock`, Lustre with \
`localflock`, BeeGFS as installed, most FUSE | on each machine | between machines, by \
signs of life |
| no locks (`ENOSYS`, `ENOTSUP`, `ENOLCK`) | `OSError` | by signs of life |

On NFS a lock dies with its process as long as the machine lives. Of a machine that is
lost, the server keeps it until that machine's lease runs out (NFS 4: 90 s as installed)
or, with NFS 3, until it has started again. Signs of life are the modification time of
the lock file, renewed six times per `lease_s`; an owner on another machine counts as
dead when `lease_s` has passed without one, so taking over from it may take that long.

The package `filelock` has the first of the two, without a word on who holds it; its
`SoftFileLock`, the way without locks of the kernel, stays locked when its holder is
killed. What is needed here most is the second: one owner, also where there are no
locks, and a message that names it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_distributed.errors import LockHeldError
from rl_distributed.failures.lock_owner import LockOwner, machine_id
from rl_distributed.logs.logging import get_logger

__all__ = ["FileLock", "FolderLock", "is_locked"]

_logger = get_logger(__name__)

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
# Somebody who only looks (`is_locked`) holds the lock for an instant. Even an attempt
# without a deadline outlasts that.
_LEAST_WAIT_S = 0.1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
# How far the clocks of a machine and a file server may lie apart before an owner on
# another machine that lives looks like one that died long ago.
_CLOCK_SKEW_S = 300.0


_UNKNOWN = LockOwner(0)


class _Held:
    """A file that is open and locked. Its thread refers to it, and not to the lock."""

    def __init__(self, descriptor: int, token: str) -> None:
        self.descriptor = descriptor
        self.token = token
        self.stop = threading.Event()
        # Reentrant: the garbage collector may close a lock in the very thread that
        # renews its sign of life.
        self.guard = threading.RLock()
        _all_held.add(self)

    def close(self) -> None:
        self.stop.set()
        with self.guard:
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor < 0:
                return
            try:
                # A lock that was lost may have another one's note by now.
                if self.token and _has_token(descriptor, self.token):
                    os.ftruncate(descriptor, 0)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            except OSError:
                # Closing frees it as well; the file system has gone, or has no locks.
                pass
            finally:
                os.close(descriptor)

    def renew(self, pause_s: float) -> None:
        """Give signs of life until closed."""
        while not self.stop.wait(pause_s):
            with self.guard, contextlib.suppress(OSError):
                if self.descriptor >= 0:
                    os.utime(self.descriptor)


_all_held: weakref.WeakSet[_Held] = weakref.WeakSet()


def _forget_after_fork() -> None:
    # A child has its own reference to the locked file and would keep the lock after
    # its parent's end. Closing that, without unlocking, leaves the parent's alone.
    for held in list(_all_held):
        descriptor, held.descriptor = held.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_forget_after_fork)


class FileLock:
    """An exclusive lock on a file, waited for until a deadline.

    It excludes other objects of the same process too. One object is for one thread.

    Args:
        path: The file; made if it is not there, and never removed, because another
            process may be waiting at it. A symbolic link is refused.
        purpose: What it protects, for messages: `building environment 'x'`.
        remedy: What to do where somebody else holds it, for messages.
        mode: Permissions of a file that is made, before the umask.
        is_data: The file is what is protected. Its content is left alone; else the
            holder is noted in it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        purpose: str,
        *,
        remedy: str = "wait for that process, or end it",
        mode: int = 0o666,
        is_data: bool = False,
    ) -> None:
        self.path = Path(path)
        self.purpose = purpose
        self._remedy = remedy
        self._mode = mode
        self._is_data = is_data
        self._held: _Held | None = None
        self._finalizer: Any = None

    def acquire(self, deadline_s: float = 0.0) -> None:
        """Take the lock.

        Args:
            deadline_s: How long to wait for somebody else who holds it.

        Raises:
            LockHeldError: Somebody else held it all the time; the message names the
                process, its machine and since when.
            OSError: The file cannot be written, or its file system has no locks.
            RuntimeError: This object holds it already.
        """
        if self.is_held:
            raise RuntimeError(f"{self.purpose}: {self.path} is locked by this object")
        self.release()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + max(deadline_s, _LEAST_WAIT_S)
        pause_s = _SHORTEST_PAUSE_S
        while not self._try():
            if time.monotonic() >= end:
                raise self._refusal(deadline_s)
            # Polling, because `flock` has no deadline of its own.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self) -> None:
        """Give the lock back; one that is not held stays so."""
        held, self._held = self._held, None
        if held is not None:
            self._finalizer.detach()
            held.close()

    @contextlib.contextmanager
    def held(self, deadline_s: float = 0.0) -> Iterator[int]:
        """Hold the lock in a block; gives the file's descriptor, open for appending.

        Raises:
            LockHeldError: Somebody else held it all the time.
            OSError: The file cannot be written, or its file system has no locks.
        """
        self.acquire(deadline_s)
        assert self._held is not None
        try:
            yield self._held.descriptor
        finally:
            self.release()

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock, and its file is still the one there.

        False in a forked child, and after somebody has removed the file.
        """
        held = self._held
        if held is None or held.descriptor < 0:
            return False
        return self._is_current(held.descriptor, held.token)

    def owner(self) -> LockOwner | None:
        """Return who holds the lock now; None: nobody.

        Its `pid` is 0 where the holder left no note.
        """
        return self._noted() or _UNKNOWN if is_locked(self.path) else None

    def _is_current(self, descriptor: int, token: str) -> bool:
        try:
            # Someone may have removed the file, and another process locked a new one.
            if not os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                return False
            return not token or _has_token(descriptor, token)
        except OSError:
            return False

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        # Opened for each attempt: the file may have been replaced meanwhile.
        descriptor = os.open(self.path, flags, self._mode)
        try:
            # The kernel's lock first: only its holder may write a note.
            token = self._claim(descriptor) if self._lock(descriptor) else None
        except BaseException:
            os.close(descriptor)
            raise
        if token is None:
            os.close(descriptor)
            return False
        self._held = _Held(descriptor, token)
        self._finalizer = weakref.finalize(self, self._held.close)
        return True

    def _lock(self, descriptor: int) -> bool:
        # A file that was replaced between opening and locking protects nothing.
        return _try_lock(descriptor) and self._is_current(descriptor, "")

    def _claim(self, descriptor: int) -> str | None:
        """Note the holder; return the token of the note, None where it has no effect.

        The caller holds the kernel's lock.
        """
        if self._is_data:
            return ""
        return LockOwner.this_process().write(descriptor)

    def _noted(self) -> LockOwner | None:
        if self._is_data:
            return None
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return LockOwner.read(file.fileno())
        return None

    def _refusal(self, deadline_s: float) -> LockHeldError:
        owner = self._noted() or _UNKNOWN
        waited = f", waited {deadline_s:g} s" if deadline_s else ""
        error = LockHeldError(
            f"{self.purpose}: {self.path} is held by {owner}{waited}; {self._remedy}"
        )
        error.owner = owner
        return error


class FolderLock(FileLock):
    """One owner of a folder, for as long as the owning process lives.

    Unlike a `FileLock` it also holds between machines whose file system keeps locks to
    one machine, or has none: the owner gives signs of life in the lock file.

    Args:
        folder: The folder; made if it is not there.
        purpose: What it protects, for messages: `writing checkpoints`.
        name: The lock file is `.<name>.lock` in the folder; several locks of other
            names may be held there.
        remedy: What to do where somebody else owns the folder, for messages.
        lease_s: Seconds without a sign of life after which an owner on another
            machine counts as dead.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        purpose: str,
        *,
        name: str = "owner",
        remedy: str = "wait for that process, or end it",
        lease_s: float = 30.0,
    ) -> None:
        super().__init__(Path(folder) / f".{name}.lock", purpose, remedy=remedy)
        self._lease_s = lease_s
        self._has_kernel_lock = True

    def acquire(self, deadline_s: float = 0.0) -> None:
        """Become the owner.

        Where an owner on another machine has left its note, it takes up to its
        `lease_s` beyond `deadline_s` to see whether that one lives.

        Args:
            deadline_s: How long to wait for an owner that lives.

        Raises:
            LockHeldError: Somebody else owns the folder; the message names the process,
                its machine and since when.
            OSError: The folder cannot be written.
            RuntimeError: This object owns it already.
        """
        super().acquire(deadline_s)
        held = self._held
        assert held is not None
        threading.Thread(
            target=held.renew,
            args=(self._lease_s / 6,),
            name=f"lock of {self.path.parent.name}",
            daemon=True,
        ).start()

    def owner(self) -> LockOwner | None:
        """Return who owns the folder now; None: nobody.

        Where no kernel lock tells, an owner is believed to live while its last sign of
        life is no older than its lease, by this machine's clock.
        """
        try:
            if is_locked(self.path):
                return self._noted() or _UNKNOWN
            here = machine_id()
        except OSError:
            here = ""
        noted = self._noted()
        if noted is None or noted.machine == here:
            return None
        return noted if self._silent_s() <= noted.lease_s else None

    def _lock(self, descriptor: int) -> bool:
        try:
            return super()._lock(descriptor)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if self._has_kernel_lock:
            self._has_kernel_lock = False
            _logger.warning(
                "the file system of %s has no locks: signs of life alone keep other "
                "processes out",
                self.path,
            )
        return True

    def _claim(self, descriptor: int) -> str | None:
        noted = LockOwner.read(descriptor)
        if noted is not None and self._lives(noted):
            return None
        token = LockOwner.this_process(self._lease_s).write(descriptor)
        # Others learn of it when the file server has it.
        os.fsync(descriptor)
        if not self._has_kernel_lock:
            # Another one may have looked before this note was there: the later stays.
            time.sleep(self._lease_s / 30)
            if not self._is_current(descriptor, token):
                return None
        return token

    def _lives(self, noted: LockOwner) -> bool:
        """Whether the writer of a note lives, though no kernel lock is in the way."""
        # The kernel frees the locks of dead processes, so on this machine
        # the writer is gone.
        if self._has_kernel_lock and noted.machine == machine_id():
            return False
        if self._silent_s() > noted.lease_s + _CLOCK_SKEW_S:
            return False
        _logger.info(
            "%s: %s was left by %s; waiting %g s for a sign of life",
            *(self.purpose, self.path, noted, noted.lease_s),
        )
        first = self._last_sign_ns()
        end = time.monotonic() + noted.lease_s
        while time.monotonic() < end:
            time.sleep(noted.lease_s / 30)
            if self._last_sign_ns() != first:
                return True
        return False

    def _silent_s(self) -> float:
        return time.time() - self._last_sign_ns() / 1e9

    def _last_sign_ns(self) -> int:
        # Opened again: only that makes an NFS client ask the server.
        with self.path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether any process holds a lock on `path`, exclusive or shared."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # NFS locks only what may be written; elsewhere reading will do.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EACCES is how some NFS servers say it.
        return False
    return True


def _has_token(descriptor: int, token: str) -> bool:
    noted = LockOwner.read(descriptor)
    return noted is not None and noted.token == token
