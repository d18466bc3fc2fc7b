"""What a sandbox is asked for, and what became of a program."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["SandboxLevel", "SandboxLimits", "SandboxResult", "SandboxStatus"]

SandboxStatus: TypeAlias = Literal[
    "ok", "error", "signal", "time", "memory", "output", "sandbox"
]
"""Why a program ended: exit code 0, another one, a signal, its limit of time, a
MemoryError that it did not catch, its limit of output; or the sandbox failed, and the
program is not to blame."""


class SandboxLevel(enum.IntEnum):
    """How far a program is confined; each level has what those below it have."""

    SECCOMP = 1
    """A uid of its own where the caller is root, rlimits, no_new_privs and seccomp: no
    other process, no socket, no file that can be written."""
    LANDLOCK = 2
    """Files other than Python's own libraries cannot be read."""
    NAMESPACES = 3
    """Own mounts, network and IPC; an empty scratch folder that can be written."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use."""

    time_s: float = 5.0
    """Seconds from its start to its end."""
    memory_bytes: int = 512 << 20
    """Address space, that of the interpreter included."""
    output_bytes: int = 64 << 10
    """Of standard output, and of errors; at this size the program is ended."""
    scratch_bytes: int = 16 << 20
    """Of its scratch folder."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0: got {value!r}")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What became of one program. All of it but `status` may be the program's lies."""

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int | None
    """None: a signal ended it."""
    signal: int | None
    time_s: float
    memory_bytes: int
    """Most memory in use at a time, that of the interpreter included."""
