"""`AheadSampler`: what a trainer holds to have answers sampled ahead of training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.workers import TRAINER, Worker
from rl_algorithms.errors import ScheduleError
from rl_algorithms.rollout import RolloutEngine, RolloutResult
from rl_algorithms.rollout.judge import Verdict
from rl_algorithms.trainers.ahead.controller import Controller
from rl_algorithms.trainers.ahead.generating import GeneratorDesk
from rl_algorithms.trainers.ahead.jobs import Job, Scoring
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.scoring import EnvironmentDesk
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_algorithms.trainers.ahead.weights import PublishedVersions
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.values import Max, Mean, MetricValue, Sum
from rl_models.interfaces import GenerationInterface
from rl_models.weights.sync import WeightSynchronizer

__all__ = ["AheadSampler"]

_logger = get_logger(__name__)

_GENERATOR = Worker("generator", 0)
_ENVIRONMENT = Worker("environment", 0)
_LOOK_S = 0.5
_CLOSE_S = 10.0


@dataclass
class _Attempts:
    """How often an answer was begun."""

    count: int = 0
    began_s: float = field(default_factory=time.monotonic)


class AheadSampler:
    """Has answers sampled and scored while a trainer works on earlier ones.

    `next_step`, `end_step`, `wait_for_weights`, `state` and `close` are for the thread
    of the trainer.

    Args:
        config: The section `asynchronous`.
        shape: Numbers of the run.
        prompts: Where prompts come from.
        rollouts: Opens and finishes conversations.
        generation: Samples.
        sync: Publishes the trainer's weights and brings them to the generator.
        calls_at_once: Calls that the environment takes at a time.
        pad_token_id: Pads rows.
        check: Raises what has come to end the run; called while something is waited
            for.
        state: What `state` gave when the checkpoint was written; None: none did.
        log_folder: Where the event log is written, if the configuration wants one.
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
        state: Mapping[str, Any] | None,
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
        self._jobs: dict[int, Job] = {}
        self._scorings: dict[int, Scoring] = {}
        self._attempts: dict[tuple[int, int], _Attempts] = {}
        self._num_dropped = 0
        self._versions = PublishedVersions(sync, shape.first_step)
        self._loaded = shape.first_step
        schedule = Schedule(shape.settings(config, prompts.prompts_per_epoch))
        self._resume(schedule, state)
        log = log_folder / f"events_{shape.first_step:06d}.jsonl"
        self._controller = Controller(
            schedule,
            self._carry_out,
            self._fail,
            lambda: [_ENVIRONMENT] if self._environment.has_room else [],
            log if config.event_log else None,
        )
        self._environment = EnvironmentDesk(
            rollouts.judge, calls_at_once, self._take_verdict, self._fail
        )
        self._generator = GeneratorDesk(
            generation,
            pad_token_id,
            self._versions.load,
            shape.first_step,
            on_answer=self._take_answer,
            on_loaded=self._note_loaded,
            on_failure=self._fail,
        )
        self._controller.start(self._resumed)
        self._controller.tell(ev.Begin)

    def _resume(self, schedule: Schedule, state: Mapping[str, Any] | None) -> None:
        """Put the schedule where the run goes on."""
        self._resumed: Mapping[str, Any] | None = state
        if state is None and self._shape.first_step:
            # The checkpoint is of a run that sampled and trained in turns.
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

    # --- what the trainer calls -------------------------------------------------------

    def next_step(self) -> tuple[RolloutResult | None, dict[str, MetricValue]]:
        """Wait for the answers of the next step.

        Returns:
            The answers, None where the prompts are used up before the last step, and
            metrics.

        Raises:
            ScheduleError: The run cannot go on.
            RolloutError: Too many answers failed.
            Exception: What generator or environment raised.
        """
        self._wait(lambda: self._ready is not None or self._end is not None)
        train = self._ready
        if train is None:
            return None, {}
        groups = [[self._jobs[rows] for rows in group.rows] for group in train.groups]
        played = [[job.played for job in group if job.played] for group in groups]
        # Looked up one by one: the controller goes on meanwhile with other prompts.
        attempts = [
            self._attempts[group.prompt, sample].count
            for group in train.groups
            for sample in range(self._shape.num_generations)
        ]
        num_retried = sum(attempts) - len(attempts)
        result = self._rollouts.finish(played, num_retried)
        ages = [
            train.step - job.oldest_version
            for group in groups
            for job in group
            if job.oldest_version is not None
        ]
        with self._changed:
            dropped, self._num_dropped = self._num_dropped, 0
        return result, {
            "asynchronous/staleness_mean": Mean.of([float(age) for age in ages]),
            "asynchronous/staleness_max": Max(float(max(ages))),
            "asynchronous/num_dropped_groups": Sum(float(dropped)),
        }

    def end_step(self, number: int) -> None:
        """Say that a step is done, and keep a copy of its weights for the generator.

        Args:
            number: What the weights are called: optimizer steps so far.
        """
        train = self._ready
        if train is None:
            return
        self._versions.publish(number)
        self._ready = None
        self._controller.tell(
            ev.StepTrained, incarnation=train.incarnation, step=train.step
        )

    def wait_for_weights(self) -> bool:
        """Wait until the generator has the newest weights.

        Returns:
            Whether it has; the schedule brings none after its last step.
        """
        newest = self._versions.newest
        self._wait(lambda: self._loaded >= newest or self._end is not None)
        return self._loaded >= newest

    @property
    def end_reason(self) -> str | None:
        """Why no further step comes; None: one does."""
        return None if self._end is None else self._end.reason

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values.

        Finished answers are not in it: their prompts are, and are sampled again with
        the same seeds.
        """
        state = self._controller.ask(lambda schedule: schedule.state_dict())
        groups = [
            {name: value for name, value in group.items() if name != "answers"}
            for group in state["groups"]
        ]
        return {**state, "groups": groups}

    def close(self) -> None:
        """End all threads; calls that go on are waited for a little."""
        with self._changed:
            self._is_closed = True
        self._controller.close(_CLOSE_S)
        self._generator.close(_CLOSE_S)
        self._environment.close(_CLOSE_S)

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait in the trainer's thread; the schedule ends what takes too long."""
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
        with self._changed:
            if self._failure is None and not self._is_closed:
                self._failure = error
            self._changed.notify_all()

    # --- what the schedule wants done: in the controller's thread ---------------------

    def _carry_out(self, actions: Sequence[act.Action]) -> None:
        jobs: list[Job] = []
        scorings: list[Scoring] = []
        for action in actions:
            if isinstance(action, act.Sample):
                jobs.append(self._begin(action))
            elif isinstance(action, act.Score):
                self._score(action, scorings)
            else:
                self._do(action)
        if jobs:
            self._generator.ask(jobs)
        if scorings:
            self._environment.ask(scorings)

    def _do(self, action: act.Action) -> None:
        match action:
            case act.LoadWeights(version=version):
                self._generator.load(version)
            case act.Train():
                self._tell_trainer("_ready", action)
            case act.Finish():
                self._tell_trainer("_end", action)
            case act.Fail(reason):
                raise ScheduleError(f"the asynchronous run cannot go on: {reason}")
            case act.Cancel(task=task):
                self._cancel(task)
            case act.Discard(rows):
                self._forget(rows)
            case act.DropGroup():
                self._report(action)
            case act.StartWorker() | act.SaveCheckpoint():
                self._confirm(action)

    def _confirm(self, action: act.StartWorker | act.SaveCheckpoint) -> None:
        """Answer at once: workers run, and the trainer's loop writes checkpoints."""
        if isinstance(action, act.SaveCheckpoint):
            kind: type[ev.Event] = ev.CheckpointSaved
            values: dict[str, Any] = {"step": action.step}
        elif action.worker == TRAINER:
            kind, values = ev.TrainerReady, {}
        else:
            kind, values = ev.WorkerReady, {"worker": action.worker}
        self._controller.tell(kind, incarnation=action.incarnation, **values)

    def _tell_trainer(self, name: str, action: act.Action) -> None:
        with self._changed:
            setattr(self, name, action)
            self._changed.notify_all()

    def _begin(self, asked: act.Sample) -> Job:
        name, number = asked.name, asked.prompt.number
        attempts = self._attempts.setdefault((number, name.sample), _Attempts())
        attempts.count += 1
        conversation = self._rollouts.open(
            self._prompts.get(asked.prompt, self._rollouts),
            seed=self._shape.seed,
            step=name.step,
            place=name.prompt,
            sample=name.sample,
            attempt=name.attempt,
        )
        self._jobs[asked.task] = job = Job(asked, conversation)
        return job

    def _score(self, asked: act.Score, scorings: list[Scoring]) -> None:
        scoring = Scoring(self._jobs[asked.rows], asked.task)
        self._scorings[asked.task] = scoring
        if scoring.job.conversation.needs_verdict:
            scorings.append(scoring)
        else:
            self._controller.do(lambda: self._settle(scoring))

    def _cancel(self, task: int) -> None:
        scoring = self._scorings.pop(task, None)
        if scoring is not None:
            scoring.is_cancelled = True
        elif task in self._jobs:
            self._jobs.pop(task).is_cancelled = True

    def _forget(self, rows: int) -> None:
        job = self._jobs.pop(rows, None)
        if job is not None and job.played is not None:
            # It is trained on: the others of its group go with it.
            self._release(job.asked.prompt.number)

    def _release(self, number: int) -> None:
        self._prompts.release(number)
        for sample in range(self._shape.num_generations):
            self._attempts.pop((number, sample), None)

    def _report(self, dropped: act.DropGroup) -> None:
        with self._changed:
            self._num_dropped += 1
        self._release(dropped.prompt.number)
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

    def _settle(self, scoring: Scoring) -> None:
        """Tell of an answer that has all its verdicts."""
        if scoring.is_cancelled:
            return
        assert scoring.task is not None
        self._scorings.pop(scoring.task, None)
        job = scoring.job
        job.played = played = job.conversation.played()
        asked = job.asked
        attempts = self._attempts[asked.prompt.number, asked.name.sample]
        elapsed_s = time.monotonic() - attempts.began_s
        values: dict[str, Any] = {
            "worker": _ENVIRONMENT,
            "incarnation": 0,
            "task": scoring.task,
        }
        if self._rollouts.wants_again(played, attempts.count, elapsed_s):
            error = played.notes.errors[0]
            job.played = None
            self._controller.tell(
                ev.ScoreFailed, **values, reason=str(error or "it got no reward")
            )
        else:
            # One that failed for good is scored as well: the result of the step says
            # what becomes of it, as in a synchronous run.
            self._controller.tell(ev.Scored, **values, reward=float(played.rewards[0]))

    def _lose(self, job: Job, error: Exception) -> None:
        """Repeat an answer that could not be sampled, or report its end."""
        asked = job.asked
        attempts = self._attempts.get((asked.prompt.number, asked.name.sample))
        if attempts is None:
            return  # its group was dropped meanwhile
        elapsed_s = time.monotonic() - attempts.began_s
        if self._rollouts.wants_again(
            job.conversation.played(), attempts.count, elapsed_s
        ):
            self._controller.tell(
                ev.AnswerFailed,
                worker=_GENERATOR,
                incarnation=asked.incarnation,
                task=asked.task,
                reason=str(error),
            )
        else:
            self._tell_answered(job)

    # --- what the desks tell: in their threads ----------------------------------------

    def _take_answer(self, job: Job, error: Exception | None) -> None:
        if error is not None:
            self._controller.do(lambda: self._lose(job, error))
        elif job.conversation.goes_on:
            self._environment.ask([Scoring(job, None)])
        else:
            self._tell_answered(job)

    def _take_verdict(self, scoring: Scoring, verdict: Verdict) -> None:
        if scoring.task is not None:
            self._controller.do(lambda: self._judge(scoring, verdict))
            return
        job = scoring.job
        job.conversation.judge(verdict)
        if job.conversation.goes_on:
            self._generator.ask([job])
        else:
            self._tell_answered(job)

    def _judge(self, scoring: Scoring, verdict: Verdict) -> None:
        if not scoring.is_cancelled:
            scoring.job.conversation.judge(verdict)
            self._settle(scoring)

    def _tell_answered(self, job: Job) -> None:
        asked = job.asked
        self._controller.tell(
            ev.Answered,
            worker=_GENERATOR,
            incarnation=asked.incarnation,
            task=asked.task,
            oldest_version=job.oldest_version,
            newest_version=job.newest_version,
            num_tokens=job.conversation.num_tokens,
        )

    def _note_loaded(self, version: int) -> None:
        with self._changed:
            self._loaded = version
            self._changed.notify_all()
        self._controller.tell(
            ev.WeightsLoaded,
            worker=_GENERATOR,
            incarnation=0,
            trainer=0,
            version=version,
        )
