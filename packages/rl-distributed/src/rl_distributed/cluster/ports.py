"""Free TCP ports, none of them given out twice on a machine.

A free port can be taken by another program before its user binds it. Two measures
prevent that: ports come from outside the kernel's range for outgoing connections, and
every port given out is recorded under a lock in a file of the machine, with the process
that it is for. So no two programs of one user get the same port, whichever nodes of a
Ray cluster they ask on. Programs of other users are kept apart only by chance: each
search starts at a random place in the range.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rl_distributed.errors import ConfigError, ResourceInsufficientError
from rl_distributed.failures.lock_owner import machine_id
from rl_distributed.file_lock import FileLock
from rl_distributed.process.start_time import started_s

__all__ = [
    "PortAllocator",
    "PortOwner",
    "default_port_range",
    "find_free_ports",
    "reserve_ports",
]

_PREFERRED_RANGE = (20_000, 32_768)
_FEWEST_PORTS = 1_000
_EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# How long a port stays with a process of another machine, which cannot be looked at.
_LEASE_S = 3_600.0
_REGISTRY_DEADLINE_S = 20.0


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = _EPHEMERAL_RANGE_FILE.read_text(encoding="ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def default_port_range() -> tuple[int, int]:
    """Ports below the kernel's outgoing ones, as a half-open range."""
    first, _ = _ephemeral_range()
    low, high = _PREFERRED_RANGE
    if first - low >= _FEWEST_PORTS:
        return low, min(high, first)
    # On a machine whose outgoing ports begin early, use the ports below them.
    if first - 1_024 >= _FEWEST_PORTS:
        return max(1_024, first - 4_000), first
    return low, high


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            # On all interfaces and without SO_REUSEADDR, to detect any use of the port.
            probe.bind(("", port))
        except OSError as error:
            # This user may not be allowed to bind ports below 1024; the
            # search just goes on.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _candidates(low: int, high: int) -> Iterator[int]:
    # A random start keeps programs on one machine out of each other's way.
    # Not from the `random` module, which programs seed alike.
    start = random.SystemRandom().randrange(low, high)
    yield from range(start, high)
    yield from range(low, start)


def find_free_ports(
    count: int, low: int, high: int, exclude: Collection[int] = ()
) -> list[int]:
    """Find `count` ports in `[low, high)` of this machine that are not in use.

    Raises:
        ResourceInsufficientError: the range has fewer free ports.
    """
    found: list[int] = []
    for port in _candidates(low, high):
        if len(found) == count:
            break
        if port not in exclude and _is_free(port):
            found.append(port)
    if len(found) < count:
        raise ResourceInsufficientError(
            f"{count} free ports are needed in [{low}, {high}) on "
            f"{socket.gethostname()}, but only {len(found)} are left; widen "
            "port_range_low and port_range_high"
        )
    return found


@dataclass(frozen=True, slots=True)
class PortOwner:
    """The process that a port is for."""

    machine: str
    """Boot of the machine and process namespace that `pid` belongs to."""
    pid: int
    started: float
    """When the process began, in seconds since the start of the machine; another one
    may get its number."""

    @classmethod
    def this_process(cls) -> PortOwner:
        """Return the owner of ports that this process asks for."""
        pid = os.getpid()
        return cls(_machine(), pid, started_s(pid))

    def is_gone(self, noted_at: float, now: float) -> bool:
        """Whether a port noted for it at `noted_at` may go to somebody else."""
        if self.machine != _machine():
            return now - noted_at > _LEASE_S
        try:
            # Process ids are reused; the start time tells the processes apart.
            return abs(started_s(self.pid) - self.started) > 1.0
        except ProcessLookupError:
            return True


@cache
def _machine() -> str:
    try:
        return f"{machine_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_id()


def reserve_ports(
    count: int,
    low: int,
    high: int,
    owner: PortOwner | None = None,
    exclude: Collection[int] = (),
    *,
    registry: Path | None = None,
    deadline_s: float = _REGISTRY_DEADLINE_S,
) -> list[int]:
    """Find free ports of this machine that no other process was given, and note them.

    Args:
        count: how many.
        low: first port of the range.
        high: end (exclusive) of the range.
        owner: for whom; its end frees the ports. None: this process.
        exclude: ports that are not wanted.
        registry: folder of the machine's notes; None: one of the user's own in the
            folder for temporary files.
        deadline_s: how long to wait for other processes that look for ports.

    Raises:
        ResourceInsufficientError: the range has fewer free ports.
        LockHeldError: other processes held the notes all the time.
    """
    owner = owner or PortOwner.this_process()
    with _registry(registry, deadline_s) as notes_file:
        # Wall-clock time, because processes on other machines may read the notes.
        now = time.time()
        notes = _live_notes(_read_notes(notes_file), now)
        taken = {note.port for note in notes}
        ports = find_free_ports(count, low, high, taken.union(exclude))
        notes += [_Note(port, owner, now) for port in ports]
        _write_notes(notes_file, notes)
    return ports


@dataclass(frozen=True, slots=True)
class _Note:
    port: int
    owner: PortOwner
    noted_at: float


@contextlib.contextmanager
def _registry(folder: Path | None, deadline_s: float) -> Iterator[Path]:
    """Yield the file of the notes, locked against other processes."""
    if folder is None:
        folder = Path(tempfile.gettempdir()) / f"rl-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Not `stat`: the folder for temporary files is shared, and another user could have
    # planted a link there.
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{folder}, where ports are noted, is not a folder of this user; have it "
            "removed, or set TMPDIR to a folder of your own"
        )
    lock = FileLock(
        folder / "lock",
        f"the notes of ports in {folder}",
        remedy="end that process if it is stopped",
        mode=stat.S_IRUSR | stat.S_IWUSR,
    )
    with lock.held(deadline_s):
        yield folder / "ports.json"


def _read_notes(file: Path) -> list[_Note]:
    try:
        rows = json.loads(file.read_bytes())
        return [
            _Note(int(port), PortOwner(str(machine), int(pid), float(start)), float(at))
            for port, machine, pid, start, at in rows
        ]
    except (FileNotFoundError, TypeError, ValueError):
        # None yet, or not ours. Ports in use are still found by binding.
        return []


def _write_notes(file: Path, notes: Sequence[_Note]) -> None:
    rows = [
        [n.port, n.owner.machine, n.owner.pid, n.owner.started, n.noted_at]
        for n in notes
    ]
    # Replaced as a whole, so that a process killed while writing leaves the old notes.
    part = file.with_name("ports.part")
    part.write_text(json.dumps(rows), encoding="ascii")
    part.replace(file)


def _live_notes(notes: Sequence[_Note], now: float) -> list[_Note]:
    @cache
    def is_gone(owner: PortOwner, noted_at: float) -> bool:
        return owner.is_gone(noted_at, now)

    def is_live(note: _Note) -> bool:
        # The age matters only for processes that cannot be looked at.
        is_here = note.owner.machine == _machine()
        return not is_gone(note.owner, 0.0 if is_here else note.noted_at)

    return [note for note in notes if is_live(note)]


class PortAllocator:
    """Gives out ports of a range and remembers them for every machine."""

    _given: dict[str, set[int]] = {}  # noqa: RUF012 - one memory for the whole process
    _lock = threading.Lock()

    def __init__(self, low: int | None = None, high: int | None = None) -> None:
        if (low is None) != (high is None):
            raise ConfigError(
                "port_range_low and port_range_high must be given together: got "
                f"{low} and {high}"
            )
        if low is None or high is None:
            low, high = default_port_range()
        if not 1 <= low < high <= 65_536:
            raise ConfigError(
                "port_range_low and port_range_high must be a half-open range within "
                f"[1, 65536): got {low} and {high}"
            )
        self.low = low
        self.high = high

    def given(self, machine: str) -> frozenset[int]:
        """Return the ports of `machine` that were given out so far."""
        with self._lock:
            return frozenset(self._given.get(machine, ()))

    def allocate(self, machine: str, count: int = 1) -> list[int]:
        """Reserve `count` new ports on this machine, known under the name `machine`."""
        # Held during the search too, so that two threads do not reserve the same ports.
        with self._lock:
            taken = self._given.setdefault(machine, set())
            ports = reserve_ports(count, self.low, self.high, exclude=taken)
            taken.update(ports)
            return ports

    def record(self, machine: str, ports: Collection[int]) -> bool:
        """Note ports found on another machine; False if one was given out before."""
        with self._lock:
            taken = self._given.setdefault(machine, set())
            if not taken.isdisjoint(ports):
                return False
            taken.update(ports)
            return True
