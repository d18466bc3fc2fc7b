"""`LimitedCalls`: requests to processes that may be killed at any time.

```
requests --one thread per process--> script (limited_server), with an alarm
        no reply in time, or it dies: no answer, and a new process takes over
```
Comparing formulas or matching a regular expression may take forever or exhaust memory,
and cannot be interrupted safely in a process that has other work.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rl_distributed.errors import ConfigError, DeadlineExceededError

__all__ = ["LimitedCalls", "Server"]

Reply: TypeAlias = dict[str, Any]

_START_S = 120.0
# On top of the process's own alarm, which usually ends it first.
_GRACE_S = 2.0
# The kernel takes a while to free a process with much memory.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """The script that answers requests, and the wording of its error messages."""

    script: Path
    """A Python file that calls `rl_envs.limited_server.run_server`."""
    purpose: str
    """Its purpose, as in "a process that <purpose> did not start"."""
    missing: str = ""
    """Message for a failed import, naming the missing package and its user."""
    remedy: str = ""
    """Remedy for a failed import."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the processes, on top of the caller's."""


class LimitedCalls:
    """Sends requests to a fixed number of processes, started on demand.

    Args:
        server: The script that they run.
        num_processes: Number of processes.
        limit_s: Time limit of one request, in seconds.
    """

    def __init__(self, server: Server, num_processes: int, limit_s: float) -> None:
        self._processes = [_Process(server, limit_s) for _ in range(num_processes)]
        self._one_call = threading.Lock()

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply | None]:
        """Return the reply to each request, in order.

        A reply is None if the request took too long or too much memory, or raised.

        Args:
            requests: Requests for the script, of JSON values.

        Raises:
            ConfigError: A package is missing.
            DeadlineExceededError: A process does not start.
        """
        results: list[Reply | None] = [None] * len(requests)
        # One call at a time, as each process serves one thread; a process that waits
        # for its next request costs nothing.
        with self._one_call:
            # Shared by all threads: a slow request holds up one process, not a fixed
            # share of the rest.
            left = iter(range(len(requests)))
            processes = self._processes[: len(requests)]
            taking = threading.Lock()

            def work(process: _Process) -> None:
                while (place := _take(left, taking)) is not None:
                    results[place] = process.ask(requests[place])

            if processes:
                with ThreadPoolExecutor(len(processes), "limited") as threads:
                    list(threads.map(work, processes))
        return results

    def close(self) -> None:
        """Stop the processes; a later call starts new ones."""
        with self._one_call:
            for process in self._processes:
                process.end()


def _take(left: Iterator[int], lock: threading.Lock) -> int | None:
    with lock:
        return next(left, None)


class _Process:
    """One process; used by one thread at a time."""

    def __init__(self, server: Server, limit_s: float) -> None:
        self._server = server
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __del__(self) -> None:
        self.end()

    def ask(self, request: Mapping[str, Any]) -> Reply | None:
        line = (json.dumps({**request, "limit_s": self._limit_s}) + "\n").encode()
        if not self._write(line):
            # It died between two requests, so this one is not to blame.
            self._start()
            self._write(line)
        reply = self._read(self._limit_s + _GRACE_S)
        if reply is None or "failed" in reply:
            # Also after an exception, which may leave the process in an unknown state.
            self.end()
            return None
        return reply

    def _write(self, line: bytes) -> bool:
        process = self._process
        if process is None or process.stdin is None:
            return False
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            self.end()
            return False
        return True

    def _read(self, limit_s: float) -> Reply | None:
        """Return the next reply; None if there is none in time, or no process."""
        process = self._process
        if process is None or process.stdout is None:
            return None
        descriptor = process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        until_s = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        reply: Reply = json.loads(line)
        return reply

    def _start(self) -> None:
        self.end()
        # -P: modules in the script's folder must not shadow those that it imports.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._server.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Nobody reads it: a full pipe would block the process.
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._server.variables},
        )
        reply = self._read(_START_S)
        if reply is None:
            # Before it is killed, as the exit code of a crash says more.
            code = self._process.poll()
            self.end()
            raise DeadlineExceededError(
                f"a process that {self._server.purpose} did not start within "
                f"{_START_S:g} s"
                + ("" if code is None else f": it ended with exit code {code}")
            )
        if "cannot_start" in reply:
            self.end()
            raise ConfigError(
                f"{self._server.missing} ({reply['cannot_start']}); "
                f"{self._server.remedy}"
            )

    def end(self) -> None:
        # What is unread belongs to the old process, and would be taken for a reply of
        # the next.
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # Closing flushes the buffer, whose reader is gone.
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        process.wait(_END_S)
