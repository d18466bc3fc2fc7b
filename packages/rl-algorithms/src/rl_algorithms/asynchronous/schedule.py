"""`Schedule`: one event in, actions out; the package's docstring has the diagram.

```
driver: event ─> Schedule.on ─> time, sender checked ─> sampling, training or failures
                                                        └> changes of `RunState`
        actions <───────────── work that can begin now <────┘
```
The events alone decide: two schedules that get the same events return the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_algorithms.asynchronous.actions import Action, Discard, Fail, Finish
from rl_algorithms.asynchronous.checkpoint_state import restore, to_dict
from rl_algorithms.asynchronous.events import (
    Answered,
    AnswerFailed,
    Begin,
    CheckpointSaved,
    Event,
    RunPaused,
    RunResumed,
    Scored,
    ScoreFailed,
    StepTrained,
    StopRequested,
    Tick,
    TrainerReady,
    WeightsLoaded,
    WorkerFailed,
    WorkerReady,
)
from rl_algorithms.asynchronous.failures import Failures
from rl_algorithms.asynchronous.sampling import Sampling
from rl_algorithms.asynchronous.settings import ScheduleSettings
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.asynchronous.training import Training
from rl_algorithms.asynchronous.waiting import describe_waits
from rl_algorithms.asynchronous.workers import TRAINER, Worker
from rl_algorithms.errors import ScheduleError

__all__ = ["Schedule"]


class Schedule:
    """Decides on sampling, training and recovery from failures.

    Args:
        settings: The shape of the run and its limits.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self.settings = settings
        self._state = RunState(settings)
        self._sampling = Sampling(self._state)
        self._training = Training(self._state)
        self._failures = Failures(self._state, self._sampling, self._training)
        sampling, training = self._sampling, self._training
        self._of_trainer: dict[type[Any], Callable[[Any], None]] = {
            StepTrained: training.step_trained,
            CheckpointSaved: training.checkpoint_saved,
            TrainerReady: self._trainer_ready,
        }
        self._of_workers: dict[type[Any], Callable[[Any], None]] = {
            WorkerReady: self._failures.ready,
            WorkerFailed: lambda event: self._failures.fail(event.worker, event.reason),
            WeightsLoaded: sampling.weights_loaded,
            Answered: self._answered,
            AnswerFailed: sampling.answer_failed,
            Scored: sampling.scored,
            ScoreFailed: sampling.score_failed,
        }

    @property
    def end(self) -> Finish | Fail | None:
        """The action that ended the run; None while it lasts."""
        return self._state.end

    def on(self, event: Event) -> list[Action]:
        """Process an event and return the actions to take now.

        Args:
            event: The event. Messages from workers that have failed since, or about
                work that is no longer wanted, change nothing.

        Returns:
            Actions in the order in which to carry them out; none after the end.

        Raises:
            ScheduleError: Time runs backwards, the run has not begun or begins twice,
                or no such worker exists.
        """
        state = self._state
        if event.at_s < state.now_s:
            raise ScheduleError(
                f"events must come in the order of time: got {event.at_s} s after "
                f"{state.now_s} s"
            )
        if isinstance(event, Begin) == state.has_begun:
            raise ScheduleError(
                "the first event, and only that, must be Begin: got "
                f"{type(event).__name__}"
            )
        state.now_s = event.at_s
        if state.end is not None:
            return []
        self._handle(event)
        if state.end is None:
            # Training goes first: a step that begins makes room for new prompts.
            self._training.proceed()
        if state.end is None:
            self._sampling.proceed()
        actions, state.actions = state.actions, []
        if state.end is not None:
            # Several waits may pass at once. Actions of those handled after the one
            # that ended the run must not reach the driver.
            del actions[actions.index(state.end) + 1 :]
        return actions

    def _handle(self, event: Event) -> None:
        # By class, the most frequent ones first: there are two events per answer.
        message: Any = event
        kind = type(event)
        if kind in self._of_workers:
            if self._is_current(message.worker, message.incarnation):
                self._of_workers[kind](message)
        elif kind in self._of_trainer:
            if self._is_current(TRAINER, message.incarnation):
                self._of_trainer[kind](message)
        else:
            self._control(event)
        if kind is Answered and message.task not in self._state.kept:
            # It was rejected or came too late: the driver must not keep its rows.
            self._discard(message.task)

    def _control(self, event: Event) -> None:
        """Process an event that comes from no worker."""
        match event:
            case Begin():
                self._begin()
            case Tick(at_s):
                for wait in self._state.deadlines.take_passed(at_s):
                    self._failures.time_is_up(wait)
            case StopRequested(_, reason):
                self._state.stop_reason = reason
            case RunPaused() | RunResumed():
                self._training.hold(isinstance(event, RunPaused))

    def _begin(self) -> None:
        self._state.has_begun = True
        self._training.begin()
        self._training.expect_progress()
        self._failures.start_all()

    def _trainer_ready(self, event: TrainerReady) -> None:
        if self._failures.mark_ready(TRAINER, event.incarnation):
            self._training.ready(event)

    def _answered(self, event: Answered) -> None:
        if (reason := self._sampling.answered(event)) is not None:
            # Restart it, or it would continue to sample with unknown weights.
            self._failures.fail(event.worker, reason)

    def _is_current(self, worker: Worker, incarnation: int) -> bool:
        """Return whether a message counts, and record its worker's sign of life."""
        workers = self._state.workers
        if worker not in workers:
            raise ScheduleError(
                f"no such worker: got {worker}; the run has the trainer, "
                f"{self.settings.num_generators} generators and "
                f"{self.settings.num_environments} environments"
            )
        if not workers.is_current(worker, incarnation):
            return False
        workers[worker].heard_s = self._state.now_s
        return True

    def _discard(self, rows: int) -> None:
        discard = Discard(rows)
        if discard not in self._state.actions:
            self._state.actions.append(discard)

    def next_deadline_s(self) -> float | None:
        """Return the time of the next `Tick`, or None if no wait is left."""
        return None if self._state.end is not None else self._state.deadlines.next_s()

    def waits(self) -> str:
        """Return a readable description of what the next step is waiting for."""
        return describe_waits(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the completed steps, as JSON values.

        It matches the weights after the same number of steps: a checkpoint must use the
        state that `SaveCheckpoint` carries.
        """
        return to_dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; must be called before `Begin`.

        `max_staleness`, batch size, workers and limits may differ; a group that is too
        old under the new settings is dropped and reported.

        Raises:
            ScheduleError: The run has begun, or the state belongs to a run with other
                data or group sizes.
        """
        if self._state.has_begun:
            raise ScheduleError(
                "load_state_dict must come before Begin: got it in a run that has "
                "begun; make a new Schedule"
            )
        restore(self._state, state)
