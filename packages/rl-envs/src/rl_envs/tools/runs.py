"""Running tools concurrently, each with a deadline.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | jobs | results | finished jobs | a result, or the next deadline |
| a thread per job | a job | its result | the tool | the tool |

A thread cannot be stopped from outside. One whose deadline has passed is abandoned (it
is a daemon) and its result is dropped; coroutines are cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Job", "ToolRun", "run_jobs"]


@dataclass(frozen=True, slots=True)
class Job:
    """A function and its arguments."""

    fn: Callable[..., Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolRun:
    """Result or error of a job."""

    value: Any = None
    error: Exception | None = None


def run_jobs(
    jobs: Sequence[Job], *, deadline_s: float, max_concurrency: int
) -> list[ToolRun]:
    """Run jobs in threads, and return their results in order.

    Args:
        jobs: The jobs.
        deadline_s: Time limit of each from its start, in seconds.
        max_concurrency: Maximum number of jobs that run at the same time.
    """
    results: list[ToolRun | None] = [None] * len(jobs)
    done: queue.SimpleQueue[tuple[int, ToolRun]] = queue.SimpleQueue()
    ends: dict[int, float] = {}
    waiting = iter(range(len(jobs)))
    missing = len(jobs)
    while missing:
        while len(ends) < max_concurrency:
            index = next(waiting, None)
            if index is None:
                break
            # From the start of the job, not of the batch: waiting for a place is not
            # its fault.
            ends[index] = time.monotonic() + deadline_s
            _start(jobs[index], index, deadline_s, done)
        try:
            # Threads start in order, so the first has the earliest deadline.
            earliest = next(iter(ends.values())) - time.monotonic()
            finished, result = done.get(timeout=max(earliest, 0.0))
        except queue.Empty:
            finished = next(iter(ends))
            result = ToolRun(error=_late(deadline_s))
        # A late result of an abandoned thread finds its entry gone, and is dropped.
        if ends.pop(finished, None) is not None:
            results[finished] = result
            missing -= 1
    return [result for result in results if result is not None]


def _start(
    job: Job,
    index: int,
    deadline_s: float,
    done: queue.SimpleQueue[tuple[int, ToolRun]],
) -> None:
    def run() -> None:
        try:
            value = job.fn(**job.arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_bounded(value, deadline_s))
            done.put((index, ToolRun(value)))
        except Exception as error:
            done.put((index, ToolRun(error=error)))
        # As by sys.exit: it would end this thread in silence, and the caller would wait
        # for the deadline.
        except BaseException as error:
            said = f"the tool ended by {error!r}"
            done.put((index, ToolRun(error=RuntimeError(said))))

    threading.Thread(target=run, name=f"tool-{index}", daemon=True).start()


async def _bounded(value: Any, deadline_s: float) -> Any:
    try:
        async with asyncio.timeout(deadline_s) as bound:
            return await value
    except TimeoutError:
        # The tool itself may raise TimeoutError.
        if not bound.expired():
            raise
        raise _late(deadline_s) from None


def _late(deadline_s: float) -> TimeoutError:
    return TimeoutError(f"no result within {deadline_s:g} s")
