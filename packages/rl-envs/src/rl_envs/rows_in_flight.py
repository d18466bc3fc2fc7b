"""`RowsInFlight`: conversations that an environment judges at the same time.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| a thread per job | a job | its verdict | the environment | the environment |
| `poll` (caller) | verdicts | a reply | the first verdict | a thread, a deadline |

The caller bounds the number of jobs. A thread cannot be stopped from outside: whoever
gives up a job that takes too long ends the process.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rl_distributed.errors import UserError, WorkerMethodError
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import EnvironmentReturn
from rl_envs.joined_returns import join_returns, split_return
from rl_envs.row_jobs import RowFailure, RowJob, RowPoll

__all__ = ["RowsInFlight"]

# Verdicts that come within this share of the time that they took are handed out
# together, because a reply costs its reader more than a verdict.
_GATHER_SHARE = 0.05
_GATHER_S = (0.002, 0.05)
_NEWEST_SHARE = 0.1

Step = Callable[[RowJob], EnvironmentReturn[Any]]


class RowsInFlight:
    """Judges conversations, each in a thread of its own.

    Args:
        step: Judges one, and is called by several threads.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._began_s: dict[int, float] = {}
        """When each job that runs began, in that order."""
        self._mean_s = 0.0
        self._process = uuid.uuid4().hex

    @property
    def count(self) -> int:
        """Number of jobs whose verdict has not been returned."""
        return len(self._began_s)

    def poll(self, begin: Sequence[RowJob], wait_s: float) -> RowPoll:
        """Begin jobs, and return the verdicts that are new.

        Args:
            begin: Jobs to begin.
            wait_s: How long to wait for the first verdict, in seconds.
        """
        for job in begin:
            self._began_s[job.number] = time.monotonic()
            threading.Thread(
                target=self._run, args=(job,), name="row", daemon=True
            ).start()
        numbers: list[int] = []
        parts: list[EnvironmentReturn[Any]] = []
        failures = []
        for number, found in self._take(wait_s):
            began_s = self._began_s.pop(number)
            took_s = time.monotonic() - began_s
            self._mean_s += _NEWEST_SHARE * (took_s - self._mean_s)
            if isinstance(found, Exception):
                failures.append(RowFailure(number, found))
            else:
                numbers.append(number)
                parts.append(found)
        return RowPoll(_joined(numbers, parts), failures, self._process)

    def late(self, limit_s: float) -> list[int]:
        """Return the jobs that have run for longer than a limit, in seconds."""
        end_s = time.monotonic() - limit_s
        return [number for number, began_s in self._began_s.items() if began_s < end_s]

    def _take(self, wait_s: float) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        least_s, most_s = _GATHER_S
        gather_s = min(max(_GATHER_SHARE * self._mean_s, least_s), most_s)
        end_s = time.monotonic() + wait_s
        try:
            # No more than run now, so that a quick environment cannot keep it here.
            while len(found) < self.count:
                left_s = end_s - time.monotonic()
                found.append(self._ended.get(timeout=max(left_s, 0.0)))
                if len(found) == 1:
                    end_s = time.monotonic() + gather_s
        except queue.Empty:
            pass
        return found

    def _run(self, job: RowJob) -> None:
        try:
            # Checked here, so that a wrong reply costs no other conversation.
            (found,) = split_return(self._step(job), 1)
            self._ended.put((job.number, found))
        except Exception as error:
            self._ended.put((job.number, _sent(error)))


def _joined(
    numbers: list[int], parts: list[EnvironmentReturn[Any]]
) -> list[tuple[list[int], EnvironmentReturn[Any]]]:
    """Join verdicts into one reply, if they have the same rewards."""
    if not parts:
        return []
    try:
        return [(numbers, join_returns(parts))]
    except EnvironmentContractError:
        return [([number], part) for number, part in zip(numbers, parts, strict=True)]


def _sent(error: Exception) -> Exception:
    """Return an exception in a form that any other process can read."""
    if isinstance(error, UserError | EnvironmentContractError):
        return error
    # As text: the class may exist in this process only.
    shown = "".join(traceback.format_exception(error)[:-1])
    return WorkerMethodError(f"step raised {type(error).__name__}: {error}\n{shown}")
