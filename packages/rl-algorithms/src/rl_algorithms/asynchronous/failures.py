"""`Failures`: failed workers and waits whose deadline has passed."""

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
    """Restarts workers and repeats their lost work as often as the settings allow.

    Args:
        state: State shared by the parts of the schedule.
        sampling: Repeats lost answers and scores.
        training: Returns to the checkpoint when the trainer is lost.
    """

    def __init__(self, state: RunState, sampling: Sampling, training: Training) -> None:
        self._state, self._sampling, self._training = state, sampling, training

    def start_all(self) -> None:
        """Start each worker for the first time."""
        for record in self._state.workers:
            self._start(record.worker)

    def ready(self, event: WorkerReady) -> None:
        """Make a worker that has started available for work."""
        self.mark_ready(event.worker, event.incarnation)

    def mark_ready(self, worker: Worker, incarnation: int) -> bool:
        """Mark a worker as started; return whether the schedule was waiting for it."""
        record = self._state.workers[worker]
        if record.phase is not WorkerPhase.STARTING:
            return False
        self._state.deadlines.clear(Wait("start", worker, incarnation))
        record.phase = WorkerPhase.READY
        return True

    def fail(self, worker: Worker, reason: str) -> None:
        """Take a failed worker's tasks away and restart it.

        Args:
            worker: A worker that is starting or ready.
            reason: Cause of the failure.
        """
        state = self._state
        record = state.workers[worker]
        record.failures_in_row += 1
        state.actions.append(StopWorker(worker, record.incarnation, reason))
        state.deadlines.clear_worker(worker)
        # Its process is gone, and with it the weights that it had confirmed.
        state.versions.forget(worker)
        restarts = state.settings.restarts_of(worker)
        pause_s = restarts.pause_before(record.failures_in_row)
        # Set before the work is handed out again, or this worker could get it back.
        record.phase = WorkerPhase.RETIRED if pause_s is None else WorkerPhase.RESTING
        # Sorted, because a set has no order of its own and a replay must act alike.
        # Also a copy: losing a task removes it from the set.
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
        # Late messages of the previous process then count as outdated.
        record.incarnation += 1
        # A start counts as a sign of life, or the silence of the process before it
        # would be held against this one.
        record.heard_s = state.now_s
        end_s = state.now_s + state.settings.limits.start_s
        state.deadlines.set(Wait("start", worker, record.incarnation), end_s)
        state.actions.append(StartWorker(worker, record.incarnation))

    def _retire(self, worker: Worker, reason: str) -> None:
        state = self._state
        record = state.workers[worker]
        restarts = state.settings.restarts_of(worker)
        state.actions.append(RetireWorker(worker, reason))
        if state.workers.is_gone(worker.kind):
            state.finish(
                Fail(
                    f"no {worker.kind} is left: {worker} failed "
                    f"{record.failures_in_row} times in a row, more than "
                    f"max_restarts={restarts.max_restarts} allows; the last time: "
                    f"{reason}"
                )
            )

    # --- waits whose deadline has passed ----------------------------------------------

    def time_is_up(self, wait: Wait) -> None:
        """Handle a wait whose deadline has passed."""
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
            # Two waits for a worker may end together, and the first already failed it.
            limit_s = getattr(self._state.settings.limits, _LIMITS[wait.what])
            self.fail(wait.who, f"{_DONE[wait.what]} within {limit_s:g} s")

    def _overdue(self, worker: Worker, wait: Wait) -> None:
        """Repeat an answer or a score elsewhere; fail its worker if that one hangs."""
        state = self._state
        limits = state.settings.limits
        limit_s = limits.score_s if wait.what == "score" else limits.answer_s
        if wait.number in state.tasks:
            reason = f"{worker} took longer than {limit_s:g} s"
            self._sampling.cancel(wait.number, reason)
        # Checked even if the group is gone by now: its worker may hang all the same. A
        # worker that reported other work since is merely slow with this task.
        record = state.workers[worker]
        # The same sum as for the deadline, so that rounding cannot make them differ.
        hangs = record.heard_s + limit_s <= state.now_s
        if hangs and record.phase is WorkerPhase.READY:
            self.fail(worker, f"no sign of life for {limit_s:g} s")
