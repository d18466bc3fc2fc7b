"""Levels, limits and results of sandboxed programs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["SandboxLevel", "SandboxLimits", "SandboxResult", "SandboxStatus"]

SandboxStatus: TypeAlias = Literal[
    "ok", "error", "signal", "time", "memory", "output", "sandbox"
]
"""How a program ended: with exit code 0, with another code, by a signal, at its time
limit, by an uncaught MemoryError, or at its output limit; "sandbox": the sandbox itself
failed, and the program is not to blame."""


class SandboxLevel(enum.IntEnum):
    """Degree of confinement; each level includes those below it."""

    SECCOMP = 1
    """A separate uid if the caller is root, rlimits, no_new_privs and seccomp: no new
    processes, no sockets, no writable files."""
    LANDLOCK = 2
    """Only Python's own libraries can be read."""
    NAMESPACES = 3
    """Separate mounts, network and IPC; an empty, writable scratch folder."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one program."""

    time_s: float = 5.0
    """Wall-clock seconds from start to end."""
    memory_bytes: int = 512 << 20
    """Address space, including that of the interpreter."""
    output_bytes: int = 64 << 10
    """Size of standard output, and of standard error; at this size it is killed."""
    scratch_bytes: int = 16 << 20
    """Size of its scratch folder."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            # Not `value <= 0`: NaN must fail, too.
            if not value > 0:
                raise ValueError(f"{name} must be above 0: got {value!r}")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of one program. Everything but `status` may be forged by the program."""

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int | None
    """None: killed by a signal."""
    signal: int | None
    time_s: float
    memory_bytes: int
    """Peak resident memory, including that of the interpreter."""
