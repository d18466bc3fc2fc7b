"""`AheadSampler`: the trainer's interface to sampling ahead of training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.checkpoint_state import saved_rows
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.staleness import StalenessRule
from rl_algorithms.asynchronous.workers import TRAINER
from rl_algorithms.errors import ScheduleError
from rl_algorithms.rollout import RolloutEngine, RolloutResult
from rl_algorithms.trainers.ahead.answers_in_flight import (
    ENVIRONMENT,
    GENERATOR,
    AnswersInFlight,
)
from rl_algorithms.trainers.ahead.controller import Controller
from rl_algorithms.trainers.ahead.jobs import FinishedAnswer
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.saved import SavedAhead
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_algorithms.trainers.ahead.weights import (
    PublishedVersions,
    WithdrawnWeightsError,
)
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig
from rl_distributed.errors import DeadlineExceededError
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.values import Max, Mean, MetricValue, Sum
from rl_distributed.process.thread_switches import frequent_thread_switches
from rl_models.errors import WeightSyncError
from rl_models.interfaces import GenerationInterface
from rl_models.weights.sync import WeightSynchronizer

__all__ = ["AheadSampler"]

T = TypeVar("T")
_logger = get_logger(__name__)

# Interval at which a waiting trainer looks for signals and requests of a person.
_LOOK_S = 0.5
# No version: nothing that the generator has is of the trainer.
_NONE = -1
# A call in flight may hang, and must not keep a run from ending.
_CLOSE_S = 10.0


class AheadSampler:
    """Samples and scores answers while a trainer works on earlier ones.

    Everything but `waits` must be called from the trainer's thread.

    Args:
        config: Section `asynchronous` of the configuration.
        shape: Numbers of the run.
        prompts: Source of the prompts.
        rollouts: Opens and finishes conversations.
        generation: Generator that samples.
        sync: Publishes the trainer's weights and loads them into the generator.
        calls_at_once: Number of calls that the environment takes at a time.
        pad_token_id: Token that pads rows to one length.
        check: Called during waits; raises if a signal or a request ends the run.
        saved: What the checkpoint to resume holds; None for a new run or a checkpoint
            without a schedule.
        log_folder: Folder of the event log, if the configuration enables it.
    """

    def __init__(
        self,
        config: AsynchronousConfig,
        shape: RunShape,
        prompts: PromptSource,
        rollouts: RolloutEngine,
        generation: GenerationInterface,
        sync: WeightSynchronizer,
        *,
        calls_at_once: int,
        pad_token_id: int,
        check: Callable[[], None],
        saved: SavedAhead | None,
        log_folder: Path,
    ) -> None:
        self._config, self._shape = config, shape
        self._prompts, self._rollouts = prompts, rollouts
        self._check = check
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._ready: act.Train | None = None
        self._end: act.Finish | None = None
        self._num_dropped = 0
        self._trainer = 0
        """Incarnation of the trainer that the schedule expects or works with."""
        self._is_lost = False
        self._rule = StalenessRule(config.max_staleness, shape.num_prompts)
        self._versions = PublishedVersions(sync, shape.first_step)
        self._loaded = shape.first_step
        schedule = Schedule(shape.settings(config, prompts.prompts_per_epoch))
        if saved is not None:
            saved = saved.within(self._rule)
        self._resume(schedule, None if saved is None else saved.state)
        log = log_folder / f"events_{shape.first_step:06d}.jsonl"
        self._controller = Controller(
            schedule,
            self._carry_out,
            lambda: self._answers.send(),
            self._fail,
            # An environment with a free thread does not hang, however slow one answer
            # is. Without this the schedule would give it up for its silence.
            lambda: [ENVIRONMENT] if self._answers.scores_in_time else [],
            log if config.event_log else None,
        )
        self._answers = AnswersInFlight(
            shape,
            prompts,
            rollouts,
            self._controller,
            generation,
            self._versions,
            calls_at_once=calls_at_once,
            pad_token_id=pad_token_id,
            on_loaded=self._note_loaded,
            on_failure=self._fail,
        )
        if saved is not None:
            self._answers.restore(saved.answers)
        self._controller.start(self._resumed)
        # Until `close`: an answer passes through four threads, each of which would wait
        # for one that computes, such as the trainer's.
        self._switches = ExitStack()
        self._switches.enter_context(frequent_thread_switches())
        self._controller.tell(ev.Begin)

    def _resume(self, schedule: Schedule, state: Mapping[str, Any] | None) -> None:
        """Set the schedule to the point where the run resumes."""
        self._resumed: Mapping[str, Any] | None = state
        if state is None and self._shape.first_step:
            # The checkpoint comes from a synchronous run, which has no schedule: begin
            # where its loader stood.
            fresh = schedule.state_dict()
            position = self._prompts.position()
            self._resumed = {
                **fresh,
                "step": self._shape.first_step,
                "position": position,
            }
        if self._resumed is not None:
            if self._resumed["step"] != self._shape.first_step:
                raise ScheduleError(
                    f"the checkpoint has a schedule after {self._resumed['step']} "
                    f"steps and weights after {self._shape.first_step}: resume from "
                    "another one"
                )
            schedule.load_state_dict(self._resumed)

    # --- interface of the trainer -----------------------------------------------------

    def next_step(self) -> tuple[RolloutResult | None, dict[str, MetricValue]]:
        """Wait for the answers of the next step.

        Returns:
            The answers, or None if the prompts run out before the last step, and
            metrics.

        Raises:
            ScheduleError: The run cannot continue.
            RolloutError: Too many answers failed.
            Exception: The generator or the environment raised it.
        """
        self._wait(lambda: self._ready is not None or self._end is not None)
        train = self._ready
        if train is None:
            return None, {}
        groups = self._answers.of_step(train)
        played = [[answer.played for answer in group] for group in groups]
        result = self._rollouts.finish(played, self._answers.num_retried(train))
        versions = result.rows["token_versions"]
        ages = [
            train.step - answer.oldest_version for group in groups for answer in group
        ]
        with self._changed:
            dropped, self._num_dropped = self._num_dropped, 0
        return result, {
            "asynchronous/staleness_mean": Mean.of([float(age) for age in ages]),
            "asynchronous/staleness_max": Max(float(max(ages))),
            "asynchronous/mixed_version_rate": Mean.of(_mix_versions(versions).float()),
            "asynchronous/num_dropped_groups": Sum(float(dropped)),
        }

    def end_step(self, number: int) -> None:
        """Report a completed step, and publish its weights to the generator.

        Args:
            number: Weight version of the trainer: its number of optimizer steps.
        """
        train = self._ready
        if train is None:
            return
        # Published before the step is reported: the schedule answers with
        # `LoadWeights`, which must find the version.
        self._versions.publish(number)
        self._ready = None
        self._controller.tell(
            ev.StepTrained, incarnation=train.incarnation, step=train.step
        )

    def wait_for_weights(self) -> bool:
        """Wait until the generator has the newest weights.

        Returns:
            Whether it has them; after its last step the schedule loads none.
        """
        newest = self._versions.newest
        self._wait(lambda: self._loaded >= newest or self._end is not None)
        return self._loaded >= newest

    def lose_trainer(self, reason: str) -> bool:
        """Note that the workers of the trainer are lost, with their weights.

        Answers in flight go on.

        Args:
            reason: What became of them.

        Returns:
            Whether the schedule can go on, with `trainer_is_back`; not after its end.
        """
        self._is_lost = True
        self._versions.withdraw()
        self._controller.tell(
            ev.WorkerFailed,
            worker=TRAINER,
            incarnation=self._trainer,
            reason=reason,
        )

        # After this answer nothing comes any more that was meant for the lost trainer.
        goes_on = self._ask(lambda schedule: schedule.end is None)
        with self._changed:
            self._ready, self._loaded = None, _NONE
            # Weights that could not be had are a consequence of the loss, and their
            # thread goes on. After any other failure a thread has ended.
            if isinstance(self._failure, WeightSyncError):
                self._failure = None
        return goes_on

    def trainer_is_back(self, saved: SavedAhead | None, number: int) -> None:
        """Continue with a trainer that has restored an earlier state.

        Answers of its weights, and of older ones, are kept; others are sampled again.

        Args:
            saved: What its checkpoint holds; None: it is back at the beginning.
            number: Weight version of the trainer.
        """
        step, state = self._shape.first_step, None
        answers: Mapping[int, FinishedAnswer] = {}
        if saved is not None:
            saved = saved.within(self._rule)
            step, state, answers = saved.state["step"], saved.state, saved.answers
        self._versions.start_over(self._trainer, step, number)
        self._is_lost = False
        self._controller.do(lambda: self._answers.begin_going_back(answers))
        self._controller.tell(ev.TrainerReady, incarnation=self._trainer, state=state)
        self._controller.do(self._answers.end_going_back)

    def hold(self, is_paused: bool) -> None:
        """Pause or resume the schedule; calls in flight are finished.

        Args:
            is_paused: Whether the trainer is paused.
        """
        self._controller.tell(ev.RunPaused if is_paused else ev.RunResumed)

    @property
    def end_reason(self) -> str | None:
        """Reason why no further step comes, or None."""
        return None if self._end is None else self._end.reason

    def state(self) -> SavedAhead:
        """Return what a checkpoint has to hold."""

        def look(schedule: Schedule) -> SavedAhead:
            # Both at once, in the controller's thread: an answer may be scored, or a
            # group dropped, in between.
            state = schedule.state_dict()
            return SavedAhead(state, self._answers.finished(saved_rows(state)))

        return self._ask(look)

    def waits(self, timeout_s: float) -> str:
        """Return what the next step waits for; may be called from any thread.

        Raises:
            DeadlineExceededError: The controller does not answer in time.
        """
        return self._controller.ask(lambda schedule: schedule.waits(), timeout_s)

    def close(self) -> None:
        """End all threads, and wait a short time for calls in flight."""
        with self._changed:
            self._is_closed = True
        # The controller first, so that results of the desks cause no further requests.
        self._controller.close(_CLOSE_S)
        self._answers.close(_CLOSE_S)
        self._switches.close()

    def _ask(self, question: Callable[[Schedule], T]) -> T:
        """Ask the schedule; raise what has ended its thread, if anything has."""
        try:
            return self._controller.ask(question)
        except DeadlineExceededError:
            with self._changed:
                failure = self._failure
            if failure is not None:
                raise failure from None
            raise

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait in the trainer's thread; the schedule's deadlines bound the wait."""
        while True:
            self._check()
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._changed.wait_for(
                    lambda: holds() or self._failure is not None, _LOOK_S
                ) and (self._failure is None):
                    return

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, WithdrawnWeightsError):
            return  # those of the trainer that goes on are loaded next
        with self._changed:
            if self._is_lost and isinstance(error, WeightSyncError):
                return  # replicas were lost, too: the next trainer's weights reach them
            # Keep the first failure: later ones are mostly consequences. Calls that
            # fail because of `close` are no failures of the run.
            if self._failure is None and not self._is_closed:
                self._failure = error
            self._changed.notify_all()

    # --- actions of the schedule: in the controller's thread --------------------------

    def _carry_out(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Sample):
                self._answers.sample(action)
            elif isinstance(action, act.Score):
                self._answers.score(action)
            else:
                self._do(action)

    def _do(self, action: act.Action) -> None:
        match action:
            case act.LoadWeights(version=version):
                self._answers.load(version)
            case act.Train():
                self._tell_trainer("_ready", action)
            case act.Finish():
                self._tell_trainer("_end", action)
            case act.StopWorker(worker, _, reason) if (
                worker == TRAINER and not self._is_lost
            ):
                # Its thread hangs: nobody is there to start it again.
                raise ScheduleError(f"the asynchronous run cannot continue: {reason}")
            case act.Fail(reason):
                raise ScheduleError(f"the asynchronous run cannot continue: {reason}")
            case act.Cancel(task=task):
                self._answers.cancel(task)
            case act.Discard(rows):
                self._answers.discard(rows)
            case act.DropGroup():
                self._report(action)
            case act.StartWorker() | act.SaveCheckpoint():
                self._confirm(action)

    def _confirm(self, action: act.StartWorker | act.SaveCheckpoint) -> None:
        """Confirm at once: workers run already, and the loop writes checkpoints.

        A trainer that was lost is confirmed by `trainer_is_back`.
        """
        if isinstance(action, act.SaveCheckpoint):
            kind: type[ev.Event] = ev.CheckpointSaved
            values: dict[str, Any] = {"step": action.step}
        elif action.worker == TRAINER:
            self._trainer = action.incarnation
            if self._is_lost:
                return
            kind, values = ev.TrainerReady, {}
        else:
            kind, values = ev.WorkerReady, {"worker": action.worker}
        self._controller.tell(kind, incarnation=action.incarnation, **values)

    def _tell_trainer(self, name: str, action: act.Action) -> None:
        with self._changed:
            setattr(self, name, action)
            self._changed.notify_all()

    def _report(self, dropped: act.DropGroup) -> None:
        with self._changed:
            self._num_dropped += 1
        self._answers.release(dropped.prompt.number)
        reward = "none" if dropped.mean_reward is None else f"{dropped.mean_reward:g}"
        _logger.warning(
            "prompt %d (row %d of pass %d) is not trained on: %s; %d attempts, %d "
            "tokens, mean reward %s",
            dropped.prompt.number,
            dropped.prompt.row,
            dropped.prompt.epoch,
            dropped.reason,
            dropped.attempts,
            dropped.num_tokens,
            reward,
        )

    def _note_loaded(self, version: int) -> None:
        """Record a version that the generator serves; called in the desk's thread."""
        loaded = self._versions.loaded
        with self._changed:
            # What a lost trainer has published does not count.
            if loaded.trainer == self._trainer and not self._is_lost:
                self._loaded = version
            self._changed.notify_all()
        self._controller.tell(
            ev.WeightsLoaded,
            worker=GENERATOR,
            incarnation=0,
            trainer=loaded.trainer,
            version=version,
        )


def _mix_versions(versions: Tensor) -> Tensor:
    """Return [N] bool, whether weights of several versions have sampled a row.

    Args:
        versions: [N, S] version of each token; below 0 for tokens not sampled.
    """
    newest = versions.amax(1)
    oldest = versions.where(versions >= 0, newest[:, None]).amin(1)
    return oldest < newest
