"""The note that the holder of a lock leaves in its file."""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

__all__ = ["LockOwner", "machine_id"]

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_NOTE = 4_096


@cache
def machine_id() -> str:
    """Return an identifier that no other running machine has: that of its boot."""
    try:
        return _BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that holds a lock."""

    pid: int
    """Its process ID, in its own PID namespace; 0 where it left no note."""
    host: str = ""
    """Name of its machine."""
    since: str = ""
    """When it took the lock: ISO 8601, UTC."""
    machine: str = ""
    """`machine_id()` of its machine."""
    token: str = ""
    """Random; another one each time that a lock is taken."""
    lease_s: float = 0.0
    """Seconds without a sign of life after which it counts as dead; 0.0: it gives
    none."""

    @classmethod
    def this_process(cls, lease_s: float = 0.0) -> LockOwner:
        """Return the note of this process for a lock that it has just taken."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        host = socket.gethostname()
        return cls(os.getpid(), host, now, machine_id(), uuid.uuid4().hex, lease_s)

    @classmethod
    def read(cls, descriptor: int) -> LockOwner | None:
        """Return the owner that an open file names; None where it names none."""
        try:
            note = json.loads(os.pread(descriptor, _LONGEST_NOTE, 0))
            return cls(
                pid=int(note["pid"]),
                host=str(note["host"]),
                since=str(note["since"]),
                machine=str(note["machine"]),
                token=str(note["token"]),
                lease_s=float(note["lease_s"]),
            )
        # Another program's file, or a note that is just being written.
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, descriptor: int) -> str:
        """Replace the content of an open file by this note; return its token."""
        # In place, because a new file would not carry the lock.
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(asdict(self)).encode())
        return self.token

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        if self.pid == os.getpid() and self.machine == machine_id():
            return f"this very process ({self.pid} on {self.host}) since {self.since}"
        return f"process {self.pid} on {self.host} since {self.since}"
