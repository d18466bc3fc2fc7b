"""`Failures`: workers that fail, and waits that come to their end."""

from __future__ import annotations

from rl_algorithms.asynchronous.actions import (
    Fail,
    RetireWorker,
    StartWorker,
    StopWorker,
)
from rl_algorithms.asynchronous.deadlines import Wait
from rl_algorithms.asynchronous.events import WorkerReady
from rl_algorithms.asynchronous.sampling import Sampling
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.asynchronous.training import Training
from rl_algorithms.asynchronous.waiting import describe_waits
from rl_algorithms.asynchronous.workers import TRAINER, Worker, WorkerPhase

__all__ = ["Failures"]

_LIMITS = {
    "start": "start_s",
    "load": "load_s",
    "step": "step_s",
    "save": "save_s",
}
_DONE = {
    "start": "did not start",
    "load": "did not confirm new weights",
    "step": "did not finish its step",
    "save": "did not finish the checkpoint",
}


class Failures:
    """Starts workers, and what they did again, as often as the settings allow.

    Args:
        state: What the parts of the schedule share.
        sampling: Does answers and scores again.
        training: Goes back to the checkpoint.
    """

    def __init__(self, state: RunState, sampling: Sampling, training: Training) -> None:
        self._state, self._sampling, self._training = state, sampling, training

    def start_all(self) -> None:
        """Start each worker for the first time."""
        for record in self._state.workers:
            self._start(record.worker)

    def ready(self, event: WorkerReady) -> None:
        """Give work to a worker that has started."""
        self.mark_ready(event.worker, event.incarnation)

    def mark_ready(self, worker: Worker, incarnation: int) -> bool:
        """Note that a worker has started; return whether it was waited for."""
        record = self._state.workers[worker]
        if record.phase is not WorkerPhase.STARTING:
            return False
        self._state.deadlines.clear(Wait("start", worker, incarnation))
        record.phase = WorkerPhase.READY
        return True

    def fail(self, worker: Worker, reason: str) -> None:
        """Take what a worker had to do away from it, and start it again.

        Args:
            worker: A worker that is starting or ready.
            reason: Why it has failed.
        """
        state = self._state
        record = state.workers[worker]
        record.failures_in_row += 1
        state.actions.append(StopWorker(worker, record.incarnation, reason))
        state.deadlines.clear_worker(worker)
        state.versions.forget(worker)
        pause_s = state.settings.restarts.pause_before(record.failures_in_row)
        # Before its work is given away, so that it does not get it back.
        record.phase = WorkerPhase.RETIRED if pause_s is None else WorkerPhase.RESTING
        for number in sorted(record.tasks):
            self._sampling.lose(number, f"{worker} failed: {reason}")
        if worker == TRAINER:
            self._training.abandon()
        if pause_s is None:
            self._retire(worker, reason)
        elif pause_s > 0:
            state.deadlines.set(Wait("rest", worker), state.now_s + pause_s)
        else:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        state = self._state
        record = state.workers[worker]
        record.phase = WorkerPhase.STARTING
        record.incarnation += 1
        record.heard_s = state.now_s
        end_s = state.now_s + state.settings.limits.start_s
        state.deadlines.set(Wait("start", worker, record.incarnation), end_s)
        state.actions.append(StartWorker(worker, record.incarnation))

    def _retire(self, worker: Worker, reason: str) -> None:
        state = self._state
        record = state.workers[worker]
        state.actions.append(RetireWorker(worker, reason))
        if state.workers.is_gone(worker.kind):
            state.finish(
                Fail(
                    f"no {worker.kind} is left: {worker} failed "
                    f"{record.failures_in_row} times in a row, more than "
                    f"max_restarts={state.settings.restarts.max_restarts} allows; the "
                    f"last time: {reason}"
                )
            )

    # --- waits that come to their end -------------------------------------------------

    def time_is_up(self, wait: Wait) -> None:
        """Act on a wait whose deadline has passed."""
        if wait.what == "progress":
            limit_s = self._state.settings.limits.progress_s
            waits = describe_waits(self._state)
            self._state.finish(Fail(f"no new step for {limit_s:g} s: {waits}"))
            return
        assert wait.who is not None
        if wait.what in ("answer", "score"):
            self._overdue(wait.who, wait)
        elif wait.what == "rest":
            self._start(wait.who)
        elif self._state.workers.is_current(wait.who, wait.number):
            # Two waits for one worker may end together; the first has failed it then.
            limit_s = getattr(self._state.settings.limits, _LIMITS[wait.what])
            self.fail(wait.who, f"{_DONE[wait.what]} within {limit_s:g} s")

    def _overdue(self, worker: Worker, wait: Wait) -> None:
        """Have an answer or a score done elsewhere; end its worker if that hangs."""
        state = self._state
        limits = state.settings.limits
        limit_s = limits.score_s if wait.what == "score" else limits.answer_s
        if wait.number in state.tasks:
            reason = f"{worker} took longer than {limit_s:g} s"
            self._sampling.cancel(wait.number, reason)
        # Its group may be gone by now, and the worker hangs all the same. One that goes
        # on with other work is slow with this, and does not hang.
        record = state.workers[worker]
        # Added as the deadline was, so that both are the same number.
        hangs = record.heard_s + limit_s <= state.now_s
        if hangs and record.phase is WorkerPhase.READY:
            self.fail(worker, f"no sign of life for {limit_s:g} s")
