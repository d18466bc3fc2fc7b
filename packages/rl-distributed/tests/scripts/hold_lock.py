"""Own a folder until standard input closes; arguments simulate other machines.

Arguments: the folder, seconds of the lease, and any of `far` (another machine),
`local_locks` (the file system keeps locks to one machine), `no_locks` (it has none) and
`fork` (a child outlives this process).
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from unittest import mock

from rl_distributed import file_lock
from rl_distributed.failures import lock_owner
from rl_distributed.file_lock import FolderLock

folder, lease_s, *ways = sys.argv[1:]


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def say(line: str) -> None:
    # One write, so that lines of two processes do not interleave.
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if "far" in ways:
    for module in (file_lock, lock_owner):
        mock.patch.object(module, "machine_id", return_value="another boot").start()
if "local_locks" in ways:
    mock.patch.object(fcntl, "flock", return_value=None).start()
if "no_locks" in ways:
    mock.patch.object(fcntl, "flock", no_locks).start()
lock = FolderLock(folder, "the test", lease_s=float(lease_s))
lock.acquire(60.0)
if "fork" in ways and os.fork() == 0:
    say(f"child {os.getpid()} {lock.is_held}")
    time.sleep(300)
say("held")
sys.stdin.read()
