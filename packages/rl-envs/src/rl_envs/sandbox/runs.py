"""Levels, limits and results of sandboxed programs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = [
    "Command",
    "Program",
    "SandboxLevel",
    "SandboxLimits",
    "SandboxResult",
    "SandboxStatus",
]

SandboxStatus: TypeAlias = Literal[
    "ok", "error", "signal", "time", "memory", "output", "build", "sandbox"
]
"""How a program ended: with exit code 0, with another code, by a signal, at its limit
of time, of memory (or by an uncaught MemoryError) or of output; "build": it does not
compile; "sandbox": the sandbox itself failed, and the program is not to blame."""


class SandboxLevel(enum.IntEnum):
    """Degree of confinement; each level includes those below it."""

    SECCOMP = 1
    """A separate uid if the caller is root, rlimits, no_new_privs and seccomp: no new
    processes, no sockets, no writable files."""
    LANDLOCK = 2
    """Only Python's own libraries can be read."""
    NAMESPACES = 3
    """Separate mounts, network and IPC; an empty, writable scratch folder. A command
    also has a PID namespace, and can read the machine's programs and libraries (`/usr`)
    in place of Python's."""
    CONTAINER = 4
    """An image in place of the machine's files; limits on all processes together, held
    by the kernel (cgroups)."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one program."""

    time_s: float = 5.0
    """Wall-clock seconds from start to end."""
    memory_bytes: int = 512 << 20
    """Of a Python program: address space, including that of the interpreter. Of a
    command: private memory, of each process and of all together."""
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
class Program:
    """A program and what it reads."""

    code: str
    stdin: str = ""
    language: str = "python"
    """One of `LANGUAGES`."""

    def encoded(self) -> bytes:
        """Return its text as a file has it."""
        # Surrogates that stand for undecodable bytes become these bytes again.
        return self.code.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, run in an empty scratch folder."""

    argv: tuple[str, ...]
    """The program, which the search path has, and its arguments."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the scratch folder by name; all of them may be run."""
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of one program. Everything but `status` may be forged by the program."""

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int | None
    """None: killed by a signal. A command's exit codes 129 to 192 count as signals 1 to
    64, as in a shell."""
    signal: int | None
    time_s: float
    memory_bytes: int
    """Peak resident memory of a Python program, including that of the interpreter; of a
    command, the private memory of all its processes, sampled every 50 ms. 0: not
    known."""
