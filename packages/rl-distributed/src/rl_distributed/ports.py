"""Free TCP ports, none of them given out twice.

A port that was found free can be taken by somebody else before its user binds it. Two
things keep that rare: ports come from outside the range that the kernel uses for
outgoing connections, and one process never hands out the same port of a machine twice.
"""

from __future__ import annotations

import errno
import random
import socket
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from rl_distributed.errors import ConfigError, ResourceInsufficientError

__all__ = ["PortAllocator", "default_port_range", "find_free_ports"]

_PREFERRED_RANGE = (20_000, 32_768)
_FEWEST_PORTS = 1_000
_EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
    # A machine whose outgoing ports begin early: what lies below them, then.
    if first - 1_024 >= _FEWEST_PORTS:
        return max(1_024, first - 4_000), first
    return low, high


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _candidates(low: int, high: int) -> Iterator[int]:
    # A random start keeps programs on one machine out of each other's way.
    start = random.SystemRandom().randrange(low, high)
    yield from range(start, high)
    yield from range(low, start)


def find_free_ports(
    count: int, low: int, high: int, exclude: Collection[int] = ()
) -> list[int]:
    """Find `count` ports in `[low, high)` of this machine that nobody listens on.

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


class PortAllocator:
    """Remembers what was given out, for every machine that this process asks about."""

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
        """The ports of `machine` that were given out so far."""
        with self._lock:
            return frozenset(self._given.get(machine, ()))

    def allocate(self, machine: str, count: int = 1) -> list[int]:
        """Find `count` new ports on this machine, known under the name `machine`."""
        with self._lock:
            taken = self._given.setdefault(machine, set())
            ports = find_free_ports(count, self.low, self.high, taken)
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
