"""`RowDesk`: passes answers to workers that judge many conversations at a time.

```
ask --RowJob--> WorkerCrew (a thread per worker) --> RowHost.poll_rows
verdicts of a call <-- checked together <-- those that have ended
```
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl_algorithms.rollout.judge import Judge, Verdict
from rl_algorithms.rollout.worker_crew import WorkerCrew
from rl_algorithms.trainers.ahead.jobs import Scoring
from rl_algorithms.trainers.ahead.scoring import EnvironmentDesk
from rl_distributed.errors import UserError, WorkerDiedError
from rl_envs.row_jobs import RowHost, RowJob

__all__ = ["RowDesk"]

# A conversation that crashes its worker would otherwise take down one after the other.
_MOST_LOSSES = 3


@dataclass(frozen=True, slots=True)
class _Judged:
    """What became of a job."""

    number: int
    found: Verdict | Exception


@dataclass(frozen=True, slots=True)
class _Reply:
    """A `RowPoll` whose verdicts are checked."""

    results: Sequence[_Judged]
    process: str


class _OfThread(threading.local):
    """Verdicts that a thread of the crew has received, and not passed on."""

    def __init__(self) -> None:
        self.found: list[tuple[Scoring, Verdict]] = []


class RowDesk(EnvironmentDesk):
    """Has many conversations judged at the same time, with one thread per worker.

    Those whose worker is lost go to another one, up to three times.

    Args:
        judge: The environment behind checks.
        host: The same environment.
        on_verdicts: Called with answers and the verdict on them, a row for each, in
            the thread that received it.
        on_failure: Called with an exception that ended a thread.
    """

    def __init__(
        self,
        judge: Judge,
        host: RowHost,
        on_verdicts: Callable[[Sequence[Scoring], Verdict], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        # Its only thread closes conversations.
        super().__init__(judge, 1, on_verdicts, on_failure)
        self._host = host
        self._numbers = itertools.count()
        self._judged = _OfThread()
        self._crew = WorkerCrew(
            self._poll,
            host.num_row_workers,
            host.rows_per_worker,
            on_failure,
            on_round=self._pass_on,
        )

    def ask(self, scorings: Sequence[Scoring]) -> None:
        """Request verdicts for answers."""
        for scoring in scorings:
            conversation = scoring.job.conversation
            job = RowJob(
                next(self._numbers),
                conversation.log,
                conversation.metadata,
                scoring.job.begin(),
            )
            self._begin(job, scoring, 0)

    @property
    def has_room(self) -> bool:
        """Whether a worker takes another one, so that not all conversations hang."""
        return self._crew.num_running < self._crew.capacity

    def close(self, deadline_s: float) -> None:
        """Begin no further call, and wait a short time for those in flight."""
        self._crew.close()
        super().close(deadline_s)

    def _begin(self, job: RowJob, scoring: Scoring, num_losses: int) -> None:
        self._crew.begin(job, lambda found: self._take(job, scoring, num_losses, found))

    def _take(
        self,
        job: RowJob,
        scoring: Scoring,
        num_losses: int,
        result: _Judged | Exception,
    ) -> None:
        found = result.found if isinstance(result, _Judged) else result
        if isinstance(found, UserError):
            # A mistake fails in the same way for each row and each attempt.
            self._on_failure(found)
            return
        if isinstance(found, WorkerDiedError) and num_losses + 1 < _MOST_LOSSES:
            # A number of its own: the process that replaced the lost one may have begun
            # the job as well.
            again = replace(job, number=next(self._numbers))
            self._begin(again, scoring, num_losses + 1)
            return
        if isinstance(found, Exception):
            found = self._judge.failed([job.metadata], found)
        self._judged.found.append((scoring, found))

    def _pass_on(self) -> None:
        """Pass on the verdicts of a call together."""
        judged, self._judged.found = self._judged.found, []
        if judged:
            scorings, verdicts = zip(*judged, strict=True)
            self._on_verdicts(scorings, Verdict.joined(verdicts))

    def _poll(
        self, begin: list[RowJob], cancel: list[int], wait_s: float, worker: int
    ) -> _Reply:
        # A call of the environment cannot be cancelled: its verdict is ignored.
        poll = self._host.poll_rows(begin, wait_s, worker)
        results: list[_Judged] = []
        for numbers, reply in poll.verdicts:
            verdict = self._judge.verdict(reply, len(numbers))
            results += map(_Judged, numbers, verdict.rows())
        results += (_Judged(each.number, each.error) for each in poll.failures)
        return _Reply(results, poll.process)
