"""`AnswersInFlight`: carries out the schedule's actions on answers.

```
Sample ─> sample ─> generator desk ─> take_answers ─┬─> Answered
                        ▲                           │ another turn
                        └─── take_verdicts <─ environment desk
Score ──> score ───────────────────────────> environment desk ─> Scored
```
Everything runs in the controller's thread, except `take_answers` and `take_verdicts`,
which run in the threads of the desks, and `of_step` and `num_retried`, which the
trainer calls for groups that are handed to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.workers import Worker
from rl_algorithms.rollout import RolloutEngine
from rl_algorithms.rollout.generator_desk import GeneratorDesk, LoadableWeights
from rl_algorithms.rollout.judge import Verdict
from rl_algorithms.rollout.open_conversation import judge_all
from rl_algorithms.rollout.trajectories import PlayedRow
from rl_algorithms.trainers.ahead.agents import AheadAgents
from rl_algorithms.trainers.ahead.controller import Controller
from rl_algorithms.trainers.ahead.jobs import FinishedAnswer, Job, Scoring
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.row_desk import RowDesk
from rl_algorithms.trainers.ahead.scoring import EnvironmentDesk
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_models.interfaces import GenerationInterface

__all__ = ["ENVIRONMENT", "GENERATOR", "AnswersInFlight"]

# To the schedule, each desk is one worker: the desk spreads calls over replicas itself.
GENERATOR = Worker("generator", 0)
ENVIRONMENT = Worker("environment", 0)


@dataclass
class _Attempts:
    """Attempts at an answer, and the time of the first."""

    count: int = 0
    began_s: float = field(default_factory=time.monotonic)


class AnswersInFlight:
    """The answers that are sampled and scored, from `Sample` to `Discard`.

    Args:
        shape: Numbers of the run.
        prompts: Source of the prompts.
        rollouts: Opens and finishes conversations.
        controller: Receives the events.
        generation: Generator that samples.
        weights: The versions that the generator may have to load.
        calls_at_once: Number of calls that the environment takes at a time.
        pad_token_id: Token that pads rows to one length.
        on_loaded: Called with each version that the generator has loaded.
        on_failure: Called with an exception that ended a thread of a desk.
    """

    def __init__(
        self,
        shape: RunShape,
        prompts: PromptSource,
        rollouts: RolloutEngine,
        controller: Controller,
        generation: GenerationInterface,
        weights: LoadableWeights,
        *,
        calls_at_once: int,
        pad_token_id: int,
        on_loaded: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._shape, self._controller = shape, controller
        self._prompts, self._rollouts = prompts, rollouts
        self._jobs: dict[int, Job] = {}
        self._scorings: dict[int, Scoring] = {}
        self._finished: dict[int, FinishedAnswer] = {}
        self._attempts: dict[tuple[int, int], _Attempts] = {}
        self._is_going_back = False
        self._new_jobs: list[Job] = []
        self._new_scorings: list[Scoring] = []
        judge = rollouts.judge
        self._environment = (
            EnvironmentDesk(judge, calls_at_once, self.take_verdicts, on_failure)
            if judge.row_host is None
            else RowDesk(judge, judge.row_host, self.take_verdicts, on_failure)
        )
        self._agents = (
            None
            if rollouts.agents is None
            else AheadAgents(rollouts.agents, on_failure)
        )
        self._generator = GeneratorDesk(
            generation,
            pad_token_id,
            weights,
            shape.first_step,
            in_flight=shape.updates_in_flight,
            on_answers=self.take_answers,
            on_loaded=on_loaded,
            on_failure=on_failure,
        )

    # --- groups that are handed to the trainer: in its thread -------------------------

    def of_step(self, train: act.Train) -> list[list[FinishedAnswer]]:
        """Return the answers of a step, by group."""
        return [[self._finished[rows] for rows in group.rows] for group in train.groups]

    def num_retried(self, train: act.Train) -> int:
        """Return the number of attempts at the answers of a step beyond the first."""
        groups = self.of_step(train)
        return sum(answer.attempts - 1 for group in groups for answer in group)

    # --- actions of the schedule: in the controller's thread --------------------------

    def finished(self, rows: Collection[int]) -> dict[int, FinishedAnswer]:
        """Return answers that have their rewards, by the task that sampled them."""
        return {number: self._finished[number] for number in rows}

    def restore(self, answers: Mapping[int, FinishedAnswer]) -> None:
        """Keep answers of a checkpoint, as if they had been sampled here."""
        for rows, answer in answers.items():
            self._finished[rows] = answer
            key = (answer.prompt, answer.sample)
            self._attempts[key] = _Attempts(answer.attempts)

    def begin_going_back(self, answers: Mapping[int, FinishedAnswer]) -> None:
        """Keep answers of a checkpoint beside those in flight.

        Until `end_going_back`, the schedule may give up some answers of a group and
        keep the others.
        """
        self._is_going_back = True
        self.restore(answers)

    def end_going_back(self) -> None:
        """Forget the attempts and prompts of what the schedule has given up."""
        self._is_going_back = False
        names = (job.asked for job in self._jobs.values())
        kept = {(asked.prompt.number, asked.name.sample) for asked in names}
        kept |= {(answer.prompt, answer.sample) for answer in self._finished.values()}
        self._attempts = {
            key: attempts for key, attempts in self._attempts.items() if key in kept
        }
        self._prompts.release_all_but({number for number, _ in kept})
        if self._shape.weight_updates == "between_answers":
            # The weights come once no answer is in flight, so none may wait for them,
            # and none may begin to wait later.
            self.send()
            for job in self._generator.take_stranded():
                assert isinstance(job, Job)
                self._ask_again(job)

    @property
    def scores_in_time(self) -> bool:
        """Whether the environment is known not to hang."""
        return self._environment.has_room

    def load(self, version: int) -> None:
        """Load a weight version into the generator."""
        self._generator.load(version)

    def sample(self, asked: act.Sample) -> None:
        """Open the conversation of an answer, for the next `send`."""
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
        self._new_jobs.append(job)

    def score(self, asked: act.Score) -> None:
        """Prepare a scoring for the next `send`."""
        scoring = Scoring(self._jobs[asked.rows], asked.task)
        self._scorings[asked.task] = scoring
        if scoring.job.conversation.needs_verdict:
            self._new_scorings.append(scoring)
        else:
            # In turn, not at once: a `Cancel` may follow among the same actions.
            self._controller.do(lambda: self._settle([scoring]))

    def send(self) -> None:
        """Pass everything prepared to the desks.

        One hand-over for all actions lets the generator decode them as a batch; one by
        one, the first answer would be sampled alone. What was cancelled meanwhile is
        left out.
        """
        jobs = [job for job in self._new_jobs if not job.is_cancelled]
        scorings = [each for each in self._new_scorings if not each.is_cancelled]
        self._new_jobs, self._new_scorings = [], []
        if jobs and self._agents is None:
            self._generator.ask(jobs)
        elif self._agents is not None:
            # Agents ask for answers by themselves, and report whole conversations.
            for job in jobs:
                self._agents.begin(job, self._generator.ask, self._end_agent)
        if scorings:
            self._environment.ask(scorings)

    def cancel(self, task: int) -> None:
        """Abandon a task; a call in flight finishes, but its result is ignored."""
        scoring = self._scorings.pop(task, None)
        if scoring is not None:
            scoring.is_cancelled = True
        elif task in self._jobs:
            job = self._jobs.pop(task)
            job.is_cancelled = True
            self._environment.end(job.take_ended())
            if self._agents is not None:
                self._agents.cancel(job)

    def discard(self, rows: int) -> None:
        """Release the answer that a sampling task produced."""
        job = self._jobs.pop(rows, None)
        answer = self._finished.pop(rows, None)
        if job is not None and answer is None:
            # Without a reward, its conversation is still open.
            self._environment.end(job.take_ended())
        if answer is not None and not self._is_going_back:
            # A scored answer is discarded only with its whole group, which was trained
            # on or dropped, so the prompt is not needed again.
            self.release(answer.prompt)

    def release(self, number: int) -> None:
        """Release a prompt that is trained on or dropped."""
        self._prompts.release(number)
        for sample in range(self._shape.num_generations):
            self._attempts.pop((number, sample), None)

    def close(self, deadline_s: float) -> None:
        """End the threads of the desks; wait for calls in flight until the deadline."""
        self._generator.close(deadline_s)
        self._environment.close(deadline_s)
        # A list, as a controller that did not end in time may still change them.
        jobs = list(self._jobs.values())
        left = [ended for job in jobs for ended in job.take_ended()]
        self._environment.end_now(left, deadline_s)

    def _settle(self, scorings: Sequence[Scoring]) -> None:
        """Report answers that have all their verdicts."""
        scored: list[dict[str, Any]] = []
        for scoring in scorings:
            if scoring.is_cancelled:
                continue
            assert scoring.task is not None
            self._scorings.pop(scoring.task, None)
            job = scoring.job
            played, asked = job.conversation.played(), job.asked
            attempts = self._attempts[asked.prompt.number, asked.name.sample]
            elapsed_s = time.monotonic() - attempts.began_s
            values: dict[str, Any] = {
                "worker": ENVIRONMENT,
                "incarnation": 0,
                "task": scoring.task,
            }
            if self._rollouts.wants_again(played, attempts.count, elapsed_s):
                error = played.batch.notes.errors[played.row]
                reason = str(error or "it got no reward")
                self._controller.tell(ev.ScoreFailed, **values, reason=reason)
            else:
                # An answer that failed for good counts as scored: the result of the
                # step decides what becomes of it, as in a synchronous run.
                self._finish(job, played, attempts.count)
                reward = float(played.batch.rewards[played.row])
                scored.append({**values, "reward": reward})
        if scored:
            self._controller.tell_all(ev.Scored, scored)

    def _finish(self, job: Job, played: PlayedRow, attempts: int) -> None:
        """Keep an answer for its step."""
        name, oldest = job.asked.name, job.oldest_version
        assert oldest is not None  # noted before each call of the generator
        self._finished[job.asked.task] = FinishedAnswer(
            job.asked.prompt.number, name.sample, attempts, oldest, played
        )

    def _lose(self, job: Job, error: Exception) -> None:
        """Retry an answer that could not be sampled, or report it as it is."""
        self._environment.end(job.take_ended())
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
                worker=GENERATOR,
                incarnation=asked.incarnation,
                task=asked.task,
                reason=str(error),
            )
        else:
            self._report_answers([job])

    def _ask_again(self, job: Job) -> None:
        """Retry an answer that was not begun; this is no attempt."""
        self._environment.end(job.take_ended())
        asked = job.asked
        self._jobs.pop(asked.task, None)
        self._attempts[asked.prompt.number, asked.name.sample].count -= 1
        self._controller.tell(
            ev.AnswerFailed,
            worker=GENERATOR,
            incarnation=asked.incarnation,
            task=asked.task,
            reason="the replicas were lost together with the trainer",
        )

    # --- results of the desks: in their threads ---------------------------------------

    def _end_agent(self, job: Job, error: Exception | None) -> None:
        """Report a task whose agent has ended, or retry one that was lost."""
        if error is None:
            self._report_answers([job])
        else:
            self._controller.do(lambda: self._lose(job, error))

    def take_answers(self, rows: Sequence[Any], error: Exception | None) -> None:
        """Continue, report or retry conversations after a turn of the generator."""
        self._rollouts.note_progress()
        # Others are answers that an agent waits for at its address.
        jobs = [row for row in rows if isinstance(row, Job)]
        if error is not None:
            # Attempts are counted in the controller's thread alone, without a lock.
            for job in jobs:
                self._controller.do(partial(self._lose, job, error))
            return
        going_on, ended = _parted(jobs)
        if going_on:
            # A verdict between turns bypasses the schedule, which knows whole answers.
            self._environment.ask([Scoring(job, None) for job in going_on])
        self._report_answers(ended)

    def take_verdicts(self, scorings: Sequence[Scoring], verdict: Verdict) -> None:
        """Continue or report conversations after verdicts of the environment."""
        self._rollouts.note_progress()
        whole = [row for row, each in enumerate(scorings) if each.task is not None]
        if whole:
            judged = [scorings[row] for row in whole]
            self._controller.do(
                partial(self._judge_whole, judged, verdict.select(whole))
            )
        turns = [row for row, each in enumerate(scorings) if each.task is None]
        if not turns:
            return
        jobs = [scorings[row].job for row in turns]
        judge_all([job.turns for job in jobs], verdict.select(turns))
        for row, job in zip(turns, jobs, strict=True):
            if job.is_cancelled:
                # It was closed while the call was in flight, whose metadata is newer.
                self._environment.end([verdict.metadata[row]])
            elif not job.conversation.goes_on:
                self._environment.end(job.take_ended())
        going_on, ended = _parted(jobs)
        if going_on:
            self._generator.ask(going_on)
        self._report_answers(ended)

    def _judge_whole(self, scorings: Sequence[Scoring], verdict: Verdict) -> None:
        """Apply the verdict on whole answers, and report them."""
        kept = [row for row, each in enumerate(scorings) if not each.is_cancelled]
        if len(kept) < len(scorings):
            gone = set(range(len(scorings))).difference(kept)
            self._environment.end([verdict.metadata[row] for row in sorted(gone)])
        if not kept:
            return
        judged = [scorings[row] for row in kept]
        judge_all([each.job.turns for each in judged], verdict.select(kept))
        for each in judged:
            self._environment.end(each.job.take_ended())
        self._settle(judged)

    def _report_answers(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        self._controller.tell_all(
            ev.Answered,
            [
                {
                    "worker": GENERATOR,
                    "incarnation": job.asked.incarnation,
                    "task": job.asked.task,
                    "oldest_version": job.oldest_version,
                    "newest_version": job.newest_version,
                    "num_tokens": job.conversation.num_tokens,
                }
                for job in jobs
            ],
        )


def _parted(jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Return conversations that go on, and those that do not."""
    going_on = [job for job in jobs if job.conversation.goes_on]
    return going_on, [job for job in jobs if not job.conversation.goes_on]
