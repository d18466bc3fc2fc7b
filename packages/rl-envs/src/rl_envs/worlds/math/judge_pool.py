"""`JudgePool`: comparisons in processes that may be ended at any time.

```
pairs --one thread per process--> judge_process.py: mathematics, with an alarm
        no reply in time, or its end: the pair is unverified, another process takes over
```
Comparing two formulas may take forever or all memory, and cannot be interrupted within
a process that has other work.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_envs.worlds.math import judge_process

__all__ = ["JudgePool", "Judgement"]

_START_S = 120.0
# Beyond the limit of the process's own alarm.
_GRACE_S = 2.0
# One with much memory takes a while to be gone.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one comparison."""

    correct: bool
    answer: str | None
    """What was found in the response."""
    verified: bool = True
    """False: it took too long or too much memory, or raised; it is not correct."""
    unreadable: str | None = None
    """Why the solution has no meaning; None: it has one."""


_UNVERIFIED = Judgement(correct=False, answer=None, verified=False)


class JudgePool:
    """Compares pairs of texts in a fixed number of processes, started when needed.

    Args:
        num_processes: How many.
        limit_s: Seconds that one comparison may take.
    """

    def __init__(self, num_processes: int, limit_s: float) -> None:
        self._judges = [_Judge(limit_s) for _ in range(num_processes)]
        self._one_call = threading.Lock()

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Judgement]:
        """Compare responses with solutions.

        Args:
            pairs: Of a response and its solution.

        Raises:
            ConfigError: sympy is missing.
            DeadlineExceededError: A process does not come up.
        """
        requests = [{"response": said, "solution": gold} for said, gold in pairs]
        return self._ask_all(requests)

    def read(self, solutions: Sequence[str]) -> list[str | None]:
        """Return for each solution why it cannot be read; None: it can.

        Args:
            solutions: As in `judge`.

        Raises:
            As `judge`.
        """
        judgements = self._ask_all([{"solution": text} for text in solutions])
        return [
            judged.unreadable
            if judged.verified
            else "reading it takes too long or too much memory"
            for judged in judgements
        ]

    def _ask_all(self, requests: Sequence[dict[str, str]]) -> list[Judgement]:
        results = [_UNVERIFIED] * len(requests)
        with self._one_call:
            left = iter(range(len(requests)))
            judges = self._judges[: len(requests)]
            taking = threading.Lock()

            def work(judge: _Judge) -> None:
                while (place := _take(left, taking)) is not None:
                    results[place] = judge.ask(requests[place])

            if judges:
                with ThreadPoolExecutor(len(judges), "judge") as threads:
                    list(threads.map(work, judges))
        return results

    def close(self) -> None:
        """End the processes; a later call starts others."""
        with self._one_call:
            for judge in self._judges:
                judge.end()


def _take(left: Iterator[int], lock: threading.Lock) -> int | None:
    with lock:
        return next(left, None)


class _Judge:
    """One process; used by one thread at a time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __del__(self) -> None:
        self.end()

    def ask(self, request: dict[str, str]) -> Judgement:
        line = (json.dumps({**request, "limit_s": self._limit_s}) + "\n").encode()
        if not self._write(line):
            # It ended between two comparisons, so the pair is not to blame.
            self._start()
            self._write(line)
        reply = self._read(self._limit_s + _GRACE_S)
        if reply is None or "failed" in reply:
            # Also after an exception: what it leaves behind is unknown.
            self.end()
            return _UNVERIFIED
        return Judgement(
            correct=reply.get("correct") is True,
            answer=reply.get("answer"),
            unreadable=reply.get("unreadable"),
        )

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

    def _read(self, limit_s: float) -> dict[str, Any] | None:
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
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _start(self) -> None:
        self.end()
        # -P: the folder of the script holds modules that are not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(judge_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        reply = self._read(_START_S)
        if reply is None:
            code = self._process.poll()
            self.end()
            raise DeadlineExceededError(
                "a process that compares mathematical answers did not come up within "
                f"{_START_S:g} s"
                + ("" if code is None else f": it ended with exit code {code}")
            )
        if "cannot_start" in reply:
            self.end()
            raise ConfigError(
                "environment 'math' needs sympy, which is not installed "
                f"({reply['cannot_start']}); install rl-envs[math]"
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
