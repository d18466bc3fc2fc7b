"""A child process: its input, its output up to a limit, and why it ended.

Only the standard library is imported: the zygote, a script of its own, uses this file.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Bounds", "Ended", "become", "collect", "describe", "sealed", "write_all"]

# F_SEAL_SEAL, SHRINK, GROW and WRITE: the input is read-only from then on.
_SEALS = 0xF
_CHUNK = 1 << 16
# How often memory is sampled: often enough for a fast allocation, while each look reads
# /proc for every process of a command.
_WATCH_S = 0.05


@dataclass(frozen=True)
class Bounds:
    """What a child may use before it is killed."""

    until: float
    """By the monotonic clock."""
    output_bytes: int
    """Of each of its outputs."""
    uses_too_much: Callable[[], bool] | None = None
    """Asked about memory every 50 ms; None: nobody is asked."""

    def wait_s(self) -> float:
        """Return how long to wait at most before the next look."""
        left_s = max(self.until - time.monotonic(), 0.0)
        return left_s if self.uses_too_much is None else min(left_s, _WATCH_S)

    def exceeded(self) -> str:
        """Return the limit that was met, or nothing."""
        if time.monotonic() >= self.until:
            return "time"
        return "memory" if self.uses_too_much and self.uses_too_much() else ""


@dataclass(frozen=True)
class Ended:
    """What there is to say of a child that has ended."""

    stdout: bytes
    stderr: bytes
    over: str
    """The limit for which it was killed; empty: it ended by itself."""


def sealed(data: bytes, name: str) -> int:
    """Return a file in memory, open for reading, that nobody can write."""
    handle = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    write_all(handle, data)
    # The offset belongs to the open file and so to the child as well, which must read
    # from the start.
    os.lseek(handle, 0, os.SEEK_SET)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
    return handle


def write_all(handle: int, data: bytes) -> None:
    """Write all of it."""
    # A view, because a write may be partial and slicing bytes would copy the rest each
    # time.
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def become(handles: list[int]) -> None:
    """Make the handles 0, 1, 2 and so on, and close all others."""
    # Move them out of the way first: one of them may itself be a target.
    high = [fcntl.fcntl(handle, fcntl.F_DUPFD, 10) for handle in handles]
    for target, handle in enumerate(high):
        os.dup2(handle, target)
    # Everything inherited, such as the channel to the pool, must be out of the
    # program's reach.
    os.closerange(len(handles), os.sysconf("SC_OPEN_MAX"))
    # Python ignores SIGPIPE and the zygote SIGINT; programs expect the defaults.
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def collect(pid: int, pipes: tuple[int, int], bounds: Bounds) -> Ended:
    """Read both outputs to their end; kill the process at a limit. It closes them.

    Args:
        pid: The child; it is left to be waited for.
        pipes: Standard output and errors.
        bounds: What it may use.
    """
    texts = {pipe: bytearray() for pipe in pipes}
    over = _read_all(texts, bounds)
    # A pidfd can be polled with a timeout, unlike a wait for the child.
    ended = os.pidfd_open(pid)
    # The program may have closed its output and still be running.
    if not over:
        over = _wait(ended, bounds)
    if over:
        # The child is still unreaped here, so its number cannot belong to another
        # process.
        os.kill(pid, signal.SIGKILL)
    for handle in (*pipes, ended):
        os.close(handle)
    stdout, stderr = (bytes(texts[pipe]) for pipe in pipes)
    return Ended(stdout, stderr, over)


def _read_all(texts: Mapping[int, bytearray], bounds: Bounds) -> str:
    """Read each pipe into its text; return the limit that was met, or nothing."""
    poll = select.poll()
    for pipe in texts:
        poll.register(pipe, select.POLLIN)
    num_open = len(texts)
    looked = time.monotonic()
    while num_open:
        ready = poll.poll(bounds.wait_s() * 1000)
        now = time.monotonic()
        # A child that writes all the time is looked at, too.
        if not ready or now >= bounds.until or now - looked > _WATCH_S:
            looked = now
            over = bounds.exceeded()
            if over:
                return over
        for pipe, _ in ready:
            data = os.read(pipe, _CHUNK)
            # Cut before it is stored: memory stays bounded however much the child
            # writes.
            texts[pipe].extend(data[: bounds.output_bytes - len(texts[pipe])])
            if not data:
                poll.unregister(pipe)
                num_open -= 1
            elif len(texts[pipe]) >= bounds.output_bytes:
                return "output"
    return ""


def _wait(process: int, bounds: Bounds) -> str:
    """Wait for the end of a process; return the limit that came first, or nothing."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while not poll.poll(bounds.wait_s() * 1000):
        over = bounds.exceeded()
        if over:
            return over
    return ""


def describe(
    ended: Ended, exit_code: int, time_s: float, memory_bytes: int
) -> dict[str, Any]:
    """Return the fields of a `SandboxResult`.

    Args:
        ended: What it printed, and the limit that it met.
        exit_code: Negative: the signal that ended it.
        time_s: Seconds that it took.
        memory_bytes: Most memory in use at a time.
    """
    # Output may be any bytes, or be cut in the middle of a character.
    stdout = ended.stdout.decode("utf-8", "replace")
    stderr = ended.stderr.decode("utf-8", "replace")
    if ended.over:
        status = ended.over
    # The backstop on CPU time is a time limit too, not a crash of the program.
    elif exit_code == -signal.SIGXCPU:
        status = "time"
    elif exit_code < 0:
        status = "signal"
    # The kernel reports no reason for a failed allocation; the last line of the
    # traceback is the only sign of the memory limit.
    elif exit_code == 1 and stderr.rstrip().rpartition("\n")[2].startswith(
        "MemoryError"
    ):
        status = "memory"
    else:
        status = "error" if exit_code else "ok"
    return {
        "status": status,
        "stdout": stdout,
        "stderr": stderr,
        "exit_code": exit_code if exit_code >= 0 else None,
        "signal": -exit_code if exit_code < 0 else None,
        "time_s": time_s,
        "memory_bytes": memory_bytes,
    }
