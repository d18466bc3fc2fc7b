"""`Sampling`: admits prompts, requests answers and scores, and retries failures."""

from __future__ import annotations

from math import isfinite

from rl_algorithms.asynchronous.actions import (
    Cancel,
    Discard,
    LoadWeights,
    Sample,
    Score,
)
from rl_algorithms.asynchronous.deadlines import Wait
from rl_algorithms.asynchronous.drops import drop_group
from rl_algorithms.asynchronous.events import (
    Answered,
    AnswerFailed,
    Scored,
    ScoreFailed,
    WeightsLoaded,
)
from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.state import RunState, Task
from rl_algorithms.asynchronous.workers import WorkerPhase, WorkerRecord

__all__ = ["Sampling"]


class Sampling:
    """Directs generators and environments.

    Args:
        state: State shared by the parts of the schedule.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state

    def proceed(self) -> None:
        """Request everything that can begin now."""
        if self._state.over is not None:
            return
        # Weights first: a generator that is loading does not sample, and an answer sent
        # before would keep it from loading.
        self._load_weights()
        self._send_answers()
        self._send_scores()

    # --- requests ---------------------------------------------------------------------

    def _load_weights(self) -> None:
        state = self._state
        for generator in state.workers.generators:
            if generator.phase is not WorkerPhase.READY:
                continue
            worker, incarnation = generator.worker, generator.incarnation
            version = state.versions.due(worker, len(generator.tasks))
            if version is None:
                continue
            state.versions.send(worker, version)
            end_s = state.now_s + state.settings.limits.load_s
            state.deadlines.set(Wait("load", worker, incarnation), end_s)
            trainer = state.versions.trainer
            state.actions.append(LoadWeights(worker, incarnation, trainer, version))

    def _send_answers(self) -> None:
        newest = self._state.versions.newest
        if newest is None or not self._may_have_answers:
            return
        free = self._free_generators()
        while free and (group := self._next_group(newest)) is not None:
            for answer in group.answers_in(AnswerPhase.UNSENT):
                generator = self._best_for(group, answer, free)
                self._sample(group, answer, generator, newest)
                if len(generator.tasks) >= self._state.settings.answers_per_generator:
                    free.remove(generator)
                    if not free:
                        return

    @property
    def _may_have_answers(self) -> bool:
        """Whether an answer may be left to sample: false after most events."""
        state = self._state
        return state.buffer.has_unsent or self._may_draw

    @property
    def _may_draw(self) -> bool:
        """Whether prompts are left, and room for a group."""
        state = self._state
        has_room = state.num_groups < state.settings.group_limit
        return has_room and not state.order.is_used_up

    def _free_generators(self) -> list[WorkerRecord]:
        state = self._state
        return [
            generator
            for generator in state.workers.generators
            if generator.phase is WorkerPhase.READY
            and len(generator.tasks) < state.settings.answers_per_generator
            and state.versions.may_sample(generator.worker)
        ]

    def _next_group(self, newest: int) -> Group | None:
        """Return a group with an answer to sample: an admitted one, or else a new one.

        All of its answers come before those of another group.
        """
        state = self._state
        found = state.buffer.first_unsent(state.next_step, newest)
        if found is not None:
            return found
        if not self._may_draw or not state.buffer.may_admit(state.next_step, newest):
            return None
        prompt = state.order.draw()
        group = Group.of(prompt, state.settings.num_generations_per_prompt)
        state.buffer.add(group)
        return group

    def _best_for(
        self, group: Group, answer: Answer, free: list[WorkerRecord]
    ) -> WorkerRecord:
        """Return the generator for an answer.

        Avoid the one where the answer failed; prefer the one that has already computed
        the prompt for another answer, then the least busy one.
        """
        # Without a choice no keys are made: this runs for each answer.
        if len(free) == 1:
            return free[0]
        return min(
            free,
            key=lambda generator: (
                generator.worker == answer.failed_on,
                generator.worker != group.placed_on,
                len(generator.tasks),
                # A total order, so that a replay places answers alike.
                generator.worker.rank,
            ),
        )

    def _sample(
        self, group: Group, answer: Answer, generator: WorkerRecord, version: int
    ) -> None:
        state, worker = self._state, generator.worker
        limit_s = state.settings.limits.answer_s
        number = state.new_task(group, answer, worker, "answer", limit_s)
        answer.phase = AnswerPhase.SAMPLING
        # A lower bound until the answer arrives: newer weights may come in between,
        # older ones cannot.
        answer.oldest_version = version
        group.placed_on = worker
        name = group.name_of(answer, state.settings.num_prompts_per_step)
        incarnation = generator.incarnation
        state.actions.append(
            Sample(worker, incarnation, number, group.prompt, name, version)
        )

    def _send_scores(self) -> None:
        state = self._state
        # Looked at first: few events leave an answer without a verdict.
        while state.buffer.has_unscored:
            free = [
                environment
                for environment in state.workers.environments
                if environment.phase is WorkerPhase.READY
                and len(environment.tasks) < state.settings.answers_per_environment
            ]
            if not free:
                return
            group, answer = state.buffer.first_unscored()
            environment = self._least_busy(answer, free)
            worker = environment.worker
            limit_s = state.settings.limits.score_s
            number = state.new_task(group, answer, worker, "score", limit_s)
            answer.phase = AnswerPhase.SCORING
            assert answer.rows is not None
            state.actions.append(
                Score(worker, environment.incarnation, number, answer.rows)
            )

    def _least_busy(self, answer: Answer, free: list[WorkerRecord]) -> WorkerRecord:
        if len(free) == 1:
            return free[0]
        return min(
            free,
            key=lambda environment: (
                environment.worker == answer.failed_on,
                len(environment.tasks),
                environment.worker.rank,
            ),
        )

    # --- results ----------------------------------------------------------------------

    def weights_loaded(self, event: WeightsLoaded) -> None:
        """Let a generator sample with the weights that it has confirmed."""
        confirm = self._state.versions.confirm
        if confirm(event.worker, event.trainer, event.version):
            wait = Wait("load", event.worker, event.incarnation)
            self._state.deadlines.clear(wait)

    def answered(self, event: Answered) -> str | None:
        """Accept an answer, or reject it if its weight versions are impossible.

        Returns:
            Why it is rejected, in which case its generator cannot be trusted; None if
            it is accepted.
        """
        state = self._state
        task = self._take(event.task, event)
        if task is None:
            return None
        answer, oldest = task.answer, event.oldest_version
        sent = answer.oldest_version
        assert sent is not None
        explains = state.versions.explains
        if not explains(event.worker, oldest, event.newest_version, sent):
            state.actions.append(Discard(event.task))
            reason = (
                f"{event.worker} sampled with versions {oldest} to "
                f"{event.newest_version}, and had confirmed {sent}"
            )
            self._sample_again(task, reason)
            return reason
        state.workers[event.worker].failures_in_row = 0
        state.kept.add(event.task)
        answer.phase, answer.rows = AnswerPhase.SAMPLED, event.task
        answer.oldest_version, answer.newest_version = oldest, event.newest_version
        answer.num_tokens = event.num_tokens
        return None

    def answer_failed(self, event: AnswerFailed) -> None:
        """Sample an answer again."""
        task = self._take(event.task, event)
        if task is not None:
            self._sample_again(task, event.reason)

    def scored(self, event: Scored) -> None:
        """Record the reward of an answer."""
        task = self._take(event.task, event)
        if task is None:
            return
        if not isfinite(event.reward):
            self._score_failed(task, f"its reward is {event.reward}")
            return
        # A useful result shows that the worker is sound again.
        self._state.workers[event.worker].failures_in_row = 0
        task.answer.phase, task.answer.reward = AnswerPhase.SCORED, event.reward
        if task.group.is_finished:
            self._state.drops_in_row = 0

    def score_failed(self, event: ScoreFailed) -> None:
        """Sample an answer again that the environment could not score."""
        task = self._take(event.task, event)
        if task is not None:
            self._score_failed(task, event.reason)

    def _take(
        self, number: int, event: Answered | AnswerFailed | Scored | ScoreFailed
    ) -> Task | None:
        """Return the task that an event completes; None if it is no longer wanted."""
        task = self._state.tasks.get(number)
        # A task that was lost has another number now; late results find none.
        if task is None or task.worker != event.worker:
            return None
        return self._state.drop_task(number)

    # --- failures ---------------------------------------------------------------------

    def lose(self, number: int, reason: str) -> None:
        """Repeat a task that a worker did not complete, if it is still wanted.

        Args:
            number: The task.
            reason: Why it was not completed.
        """
        if number not in self._state.tasks:
            return
        task = self._state.drop_task(number)
        if task.worker.kind == "environment":
            # The loss says nothing about the answer, so it is kept and scored
            # elsewhere.
            task.answer.phase = AnswerPhase.SAMPLED
            self._count_failure(task, reason)
        else:
            self._sample_again(task, reason)

    def cancel(self, number: int, reason: str) -> None:
        """Cancel a task that takes too long, and repeat it."""
        task = self._state.tasks[number]
        incarnation = self._state.workers[task.worker].incarnation
        self._state.actions.append(Cancel(task.worker, incarnation, number))
        self.lose(number, reason)

    def _score_failed(self, task: Task, reason: str) -> None:
        # The same seed would give the same answer and most likely break the
        # environment again, so sample another one, as a synchronous run does.
        task.answer.seed_attempt += 1
        self._sample_again(task, reason)

    def _sample_again(self, task: Task, reason: str) -> None:
        state, answer = self._state, task.answer
        if answer.rows is not None:
            state.kept.discard(answer.rows)
            state.actions.append(Discard(answer.rows))
        answer.begin_again()
        self._count_failure(task, reason)

    def _count_failure(self, task: Task, reason: str) -> None:
        answer = task.answer
        answer.failures += 1
        answer.failed_on = task.worker
        if answer.failures >= self._state.settings.max_attempts:
            drop_group(self._state, task.group, reason)
