"""`WorkerCrew`: jobs in flight on the workers of an environment.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| a thread per worker | jobs | results | a job; a poll | `begin`; a result |

However many jobs are in flight, there is one thread and one call per worker. A job
waits here until a worker has a free slot, so that no worker gets more jobs than it runs
at a time. The jobs of a worker whose process was replaced are lost, and the caller
decides whether to retry them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from rl_distributed.errors import UserError, WorkerDiedError

__all__ = ["Numbered", "Poll", "Reply", "WorkerCrew"]

_POLL_S = 0.2
_CLOSE_S = 10.0


class Numbered(Protocol):
    """A job, or its result."""

    @property
    def number(self) -> int:
        """Number of the job."""
        ...


JobT = TypeVar("JobT", bound=Numbered)
ResultT = TypeVar("ResultT", bound=Numbered)
ResultT_co = TypeVar("ResultT_co", bound=Numbered, covariant=True)


class Reply(Protocol[ResultT_co]):
    """What a worker says of its jobs."""

    @property
    def results(self) -> Sequence[ResultT_co]:
        """Results that are new."""
        ...

    @property
    def process(self) -> str:
        """Name of its process: another one has none of the jobs of the one before."""
        ...


Poll: TypeAlias = Callable[[list[JobT], list[int], float, int], Reply[ResultT]]
"""Takes jobs to begin, numbers of jobs to cancel, the seconds to wait for the first
result, and the index of the worker."""


_OnResult: TypeAlias = Callable[[ResultT | Exception], None]


class WorkerCrew(Generic[JobT, ResultT]):
    """Runs jobs until it is closed.

    Args:
        poll: Begins jobs of a worker, and returns those that have ended.
        num_workers: Number of workers.
        most: Number of jobs that one worker runs at a time.
        on_failure: Called with an error that a retry cannot fix, and with one that
            ended a thread.
        on_round: Called by a thread when it has passed on all results of a call.
    """

    def __init__(
        self,
        poll: Poll[JobT, ResultT],
        num_workers: int,
        most: int,
        on_failure: Callable[[BaseException], None],
        *,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._poll, self._on_failure = poll, on_failure
        self._on_round = on_round
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[JobT, _OnResult[ResultT]]] = deque()
        self._running: list[dict[int, _OnResult[ResultT]]] = []
        self._cancelled: list[list[int]] = []
        self._is_closed = False
        self._threads = []
        for worker in range(num_workers):
            self._running.append({})
            self._cancelled.append([])
            self._threads.append(
                threading.Thread(
                    target=self._run, args=(worker,), name="worker-crew", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    @property
    def capacity(self) -> int:
        """Number of jobs that run at the same time."""
        return len(self._threads) * self._most

    @property
    def num_running(self) -> int:
        """Number of jobs that run now."""
        with self._changed:
            return sum(map(len, self._running))

    def begin(
        self, job: JobT, on_result: Callable[[ResultT | Exception], None]
    ) -> None:
        """Run a job as soon as a worker has a free slot.

        Args:
            job: The job.
            on_result: Called with its result, or with the reason of its loss, in a
                thread of the crew.
        """
        with self._changed:
            self._waiting.append((job, on_result))
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Cancel a job, without any further callback."""
        with self._changed:
            left = [entry for entry in self._waiting if entry[0].number != number]
            self._waiting = deque(left)
            for running, cancelled in zip(self._running, self._cancelled, strict=True):
                if running.pop(number, None) is not None:
                    cancelled.append(number)
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all jobs, and wait a short time for the threads."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            for running, cancelled in zip(self._running, self._cancelled, strict=True):
                cancelled.extend(running)
                running.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self, worker: int) -> None:
        try:
            self._work(worker)
        except BaseException as error:
            # Of a callback: a thread that ended unnoticed would leave its jobs, and
            # whoever waits for them, without an end.
            self._on_failure(error)

    def _work(self, worker: int) -> None:
        process: str | None = None
        while True:
            taken = self._next(worker)
            if taken is None:
                return
            jobs, cancelled = taken
            try:
                if process is None:
                    # Known before it is given anything, so that its loss is noticed.
                    process = self._poll([], [], 0.0, worker).process
                poll = self._poll(jobs, cancelled, _POLL_S, worker)
            except Exception as error:
                self._fail(worker, error)
                process = None
                continue
            if poll.process != process:
                # What was begun by this very call may have been begun twice.
                self._lose(worker)
                process = poll.process
            self._pass_on(poll.results)

    def _next(self, worker: int) -> tuple[list[JobT], list[int]] | None:
        """Wait for the next jobs of a worker; return None once the crew is closed."""
        running = self._running[worker]
        with self._changed:
            # `begin`, `cancel` and `close` notify.
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or bool(self._waiting or running or self._cancelled[worker])
                )
            )
            cancelled, self._cancelled[worker] = self._cancelled[worker], []
            # Cancelled jobs are still passed on, or their agents would go on in the
            # worker.
            if self._is_closed and not cancelled:
                return None
            jobs = []
            # A fair share, rounded up, so that other workers get jobs too.
            share = -(-len(self._waiting) // len(self._threads))
            for _ in range(min(share, self._most - len(running))):
                job, on_result = self._waiting.popleft()
                running[job.number] = on_result
                jobs.append(job)
            return jobs, cancelled

    def _fail(self, worker: int, error: Exception) -> None:
        if isinstance(error, UserError):
            self._on_failure(error)
        self._lose(worker, error)

    def _lose(self, worker: int, error: Exception | None = None) -> None:
        with self._changed:
            # A copy, whose callbacks are called outside the lock: they may begin or
            # cancel jobs.
            lost = dict(self._running[worker])
            self._running[worker].clear()
            if error is None:
                # Those that the call began in the new process run there for nobody.
                self._cancelled[worker].extend(lost)
        cause = error or WorkerDiedError(
            f"worker {worker} of the environment was replaced while it ran jobs"
        )
        for on_result in lost.values():
            on_result(cause)
        self._on_round()

    def _pass_on(self, results: Sequence[ResultT]) -> None:
        for result in results:
            # None for a job that was cancelled after it had ended.
            on_result = self._ended(result.number)
            if on_result is not None:
                on_result(result)
        self._on_round()

    def _ended(self, number: int) -> _OnResult[ResultT] | None:
        with self._changed:
            # Of any worker: one without a node has its jobs run by another.
            for running in self._running:
                if number in running:
                    return running.pop(number)
        return None
