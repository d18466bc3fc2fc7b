"""`LimitedCalls`: requests to processes that may be ended at any time.

```
requests --one thread per process--> script (limited_server), with an alarm
        no reply in time, or its end: no answer, and another process takes over
```
A comparison of formulas, or a search by a regular expression, may take forever or all
memory, and cannot be interrupted within a process that has other work.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rl_distributed.errors import ConfigError, DeadlineExceededError

__all__ = ["LimitedCalls", "Server"]

Reply: TypeAlias = dict[str, Any]

_START_S = 120.0
# Beyond the limit of the process's own alarm.
_GRACE_S = 2.0
# One with much memory takes a while to be gone.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """Which script answers, and how messages speak of it."""

    script: Path
    """A Python file that calls `rl_envs.limited_server.run_server`."""
    purpose: str
    """What it does: "a process that <purpose> did not come up"."""
    missing: str = ""
    """What to say where an import fails: who needs which package."""
    remedy: str = ""
    """What to do then."""


class LimitedCalls:
    """Asks a fixed number of processes, started when needed.

    Args:
        server: What they run.
        num_processes: How many.
        limit_s: Seconds that one request may take.
    """

    def __init__(self, server: Server, num_processes: int, limit_s: float) -> None:
        self._processes = [_Process(server, limit_s) for _ in range(num_processes)]
        self._one_call = threading.Lock()

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply | None]:
        """Return the reply to each request, in order.

        None: it took too long or too much memory, or raised.

        Args:
            requests: What the script takes; values that JSON has.

        Raises:
            ConfigError: A package is missing.
            DeadlineExceededError: A process does not come up.
        """
        results: list[Reply | None] = [None] * len(requests)
        with self._one_call:
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
        """End the processes; a later call starts others."""
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
            # It ended between two requests, so this one is not to blame.
            self._start()
            self._write(line)
        reply = self._read(self._limit_s + _GRACE_S)
        if reply is None or "failed" in reply:
            # Also after an exception: what it leaves behind is unknown.
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
        # -P: the folder of the script holds modules that are not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._server.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        reply = self._read(_START_S)
        if reply is None:
            code = self._process.poll()
            self.end()
            raise DeadlineExceededError(
                f"a process that {self._server.purpose} did not come up within "
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
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # What is left in the buffer has no reader any more.
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        process.wait(_END_S)
