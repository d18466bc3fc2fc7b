"""Defects of earlier schedules of this kind, as changes of production code.

Each must be found by the simulator. `Defect.planted()` applies the changes while a
block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from rl_algorithms.asynchronous import (
    actions as act,
    checkpoint_state,
    drops,
    failures,
    going_back,
    sampling,
    schedule,
    training,
)
from rl_algorithms.asynchronous.buffer import GroupBuffer
from rl_algorithms.asynchronous.deadlines import Deadlines, Wait
from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.prompt_order import PromptOrder
from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.staleness import StalenessRule
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.asynchronous.weight_versions import WeightVersions
from rl_algorithms.asynchronous.workers import TRAINER, WorkerPhase, Workforce

__all__ = ["DEFECTS", "Defect"]

Patch = tuple[Any, str, Any]
"""Object, name of its attribute, and the replacement."""


@dataclass(frozen=True)
class Defect:
    """A defect in production code."""

    name: str
    story: str
    """Its consequence."""
    patches: Callable[[], list[Patch]]
    is_covering: bool = False
    """Whether it is part of CI's short run."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Apply the defect while the block runs."""
        with ExitStack() as stack:
            for target, name, replacement in self.patches():
                stack.enter_context(patch.object(target, name, replacement))
            yield


DEFECTS: list[Defect] = []


def _defect(
    story: str, *, covering: bool = False
) -> Callable[[Callable[[], list[Patch]]], None]:
    def add(patches: Callable[[], list[Patch]]) -> None:
        name = patches.__name__.strip("_").replace("_", "-")
        DEFECTS.append(Defect(name, story, patches, covering))

    return add


# --- the order of the data ------------------------------------------------------------


@_defect("sampling stops at the end of the first epoch", covering=True)
def _collector_ends_with_epoch() -> list[Patch]:
    def is_used_up(self: PromptOrder) -> bool:
        return self.position > 0 and self.position % self._per_epoch == 0

    return [(PromptOrder, "is_used_up", property(is_used_up))]


@_defect("a run that is resumed at the end of an epoch trains nothing", covering=True)
def _resume_at_epoch_end_trains_nothing() -> list[Patch]:
    original = checkpoint_state.restore

    def restore(state: RunState, saved: Any, *held: Any) -> None:
        original(state, saved, *held)
        if state.order.position and not state.order.prompt(state.order.position).row:
            state.order._end = state.order.position

    return [(schedule, "restore", restore), (going_back, "restore", restore)]


@_defect("a resumed run draws the prompts again that waited in the buffer")
def _position_is_that_of_the_trainer() -> list[Patch]:
    original = checkpoint_state.to_dict

    def to_dict(state: RunState) -> Any:
        saved = original(state)
        trained = state.step * state.settings.num_prompts_per_step
        return {**saved, "position": min(trained, saved["position"])}

    return [(training, "to_dict", to_dict)]


@_defect("the rows of an epoch are counted through the whole run")
def _row_is_the_number() -> list[Patch]:
    original = PromptOrder.prompt

    def prompt(self: PromptOrder, number: int) -> Any:
        return original(self, number)._replace(row=number)

    return [(PromptOrder, "prompt", prompt)]


@_defect("the last step waits for prompts that the data do not have")
def _last_step_is_never_full() -> list[Patch]:
    original = GroupBuffer.take

    def take(self: GroupBuffer, step: int, *, is_last: bool) -> Any:
        return original(self, step, is_last=False)

    return [(GroupBuffer, "take", take)]


@_defect("the last step does not wait for answers that are under way")
def _last_step_does_not_wait() -> list[Patch]:
    original = GroupBuffer.take

    def take(self: GroupBuffer, step: int, *, is_last: bool) -> Any:
        waiting = {n: g for n, g in self._groups.items() if not g.is_finished}
        if not is_last:
            return original(self, step, is_last=False)
        self._groups = {n: g for n, g in self._groups.items() if g.is_finished}
        taken = original(self, step, is_last=True)
        self._groups |= waiting
        return taken

    return [(GroupBuffer, "take", take)]


@_defect("an answer that is sampled again gets another seed each time")
def _every_retry_has_another_seed() -> list[Patch]:
    original = Answer.begin_again

    def begin_again(self: Answer) -> None:
        original(self)
        self.seed_attempt += 1

    return [(Answer, "begin_again", begin_again)]


# --- staleness and the buffer ---------------------------------------------------------


@_defect("groups may be one step older than max_staleness", covering=True)
def _staleness_off_by_one() -> list[Patch]:
    def last_step(self: StalenessRule, oldest_version: int) -> int:
        return oldest_version + self.max_staleness + 1

    return [(StalenessRule, "last_step", last_step)]


@_defect("sampling ahead stops one step too early, and generators stand idle")
def _staleness_too_strict() -> list[Patch]:
    def last_step(self: StalenessRule, oldest_version: int) -> int:
        return oldest_version + max(self.max_staleness - 1, 0)

    return [(StalenessRule, "last_step", last_step)]


@_defect("the age of a group is that of its newest answer")
def _age_of_the_newest_answer() -> list[Patch]:
    def oldest_version(self: Group) -> int | None:
        versions = [a.oldest_version for a in self.answers]
        return max((v for v in versions if v is not None), default=None)

    return [(Group, "oldest_version", property(oldest_version))]


@_defect("new groups are trained on first, and slow prompts starve", covering=True)
def _newest_first() -> list[Patch]:
    def by_age(self: GroupBuffer) -> list[Group]:
        return sorted(self, key=lambda g: (-(g.oldest_version or 0), -g.number))

    return [(GroupBuffer, "_by_age", by_age)]


@_defect("a step takes what is finished first, and slow groups become too old")
def _nobody_waits_for_stragglers() -> list[Patch]:
    def take(self: GroupBuffer, step: int, *, is_last: bool) -> Any:
        finished = [group for group in self if group.is_finished]
        size = self._rule.num_prompts_per_step
        if len(finished) < size and not (is_last and len(finished) == len(self)):
            return None
        for group in finished[:size]:
            self.remove(group)
        return finished[:size] or None

    return [(GroupBuffer, "take", take)]


@_defect("prompts are admitted without looking at how many can be trained on in time")
def _no_back_pressure() -> list[Patch]:
    def next_group(self: sampling.Sampling, newest: int) -> Any:
        state = self._state
        found = state.buffer.first_unsent(state.next_step, newest)
        if found is not None or state.order.is_used_up:
            return found
        prompt = state.order.draw()
        group = Group.of(prompt, state.settings.num_generations_per_prompt)
        state.buffer.add(group)
        return group

    return [(sampling.Sampling, "_next_group", next_group)]


@_defect("groups are sampled that no step of the run will train on")
def _samples_beyond_the_last_step() -> list[Patch]:
    def has_steps_for(self: StalenessRule, num_groups: int, next_step: int) -> bool:
        return True

    return [(StalenessRule, "has_steps_for", has_steps_for)]


@_defect("a group counts as finished when one answer is missing", covering=True)
def _group_lacks_an_answer() -> list[Patch]:
    def is_finished(self: Group) -> bool:
        missing = sum(a.phase is not AnswerPhase.SCORED for a in self.answers)
        return missing <= len(self.answers) // 2

    return [(Group, "is_finished", property(is_finished))]


@_defect("rows of groups that were trained on are never given back")
def _trained_rows_are_kept() -> list[Patch]:
    original = training.Training.step_trained

    def step_trained(self: training.Training, event: Any) -> None:
        original(self, event)
        actions = self._state.actions
        actions[:] = [a for a in actions if not isinstance(a, act.Discard)]

    return [(training.Training, "step_trained", step_trained)]


# --- weight versions ------------------------------------------------------------------


@_defect("a version is confirmed when it is sent, before it is loaded", covering=True)
def _confirmed_before_the_load() -> list[Patch]:
    original = WeightVersions.send

    def send(self: WeightVersions, generator: Any, version: int) -> None:
        original(self, generator, version)
        self.confirm(generator, self.trainer, version)

    return [(WeightVersions, "send", send)]


@_defect("a replica comes back with the weights that it had before", covering=True)
def _replica_keeps_its_version() -> list[Patch]:
    def forget(self: WeightVersions, generator: Any) -> None:
        pass

    return [(WeightVersions, "forget", forget)]


@_defect("a generator goes on with old weights while newer ones exist")
def _samples_with_old_weights() -> list[Patch]:
    def may_sample(self: WeightVersions, generator: Any) -> bool:
        return self._of(generator).confirmed is not None

    return [(WeightVersions, "may_sample", may_sample)]


@_defect("weights are loaded in the middle of answers that must have one version")
def _loads_in_the_middle_of_answers() -> list[Patch]:
    original = WeightVersions.due

    def due(self: WeightVersions, generator: Any, num_answers: int) -> int | None:
        return original(self, generator, 0)

    return [(WeightVersions, "due", due)]


@_defect("generators take the first weights only")
def _weights_move_once() -> list[Patch]:
    original = WeightVersions.due

    def due(self: WeightVersions, generator: Any, num_answers: int) -> int | None:
        if self._of(generator).confirmed is not None:
            return None
        return original(self, generator, num_answers)

    return [(WeightVersions, "due", due)]


@_defect("an answer is believed whatever version it was sampled with", covering=True)
def _old_answers_are_believed() -> list[Patch]:
    def explains(
        self: WeightVersions, generator: Any, oldest: int, newest: int, sent: int
    ) -> bool:
        return True

    return [(WeightVersions, "explains", explains)]


@_defect("generators keep the weights of a trainer that has gone back since")
def _weights_of_a_lost_trainer() -> list[Patch]:
    def withdraw(self: WeightVersions) -> None:
        self.newest = None

    return [(WeightVersions, "withdraw", withdraw)]


# --- answers that come late, twice or not at all --------------------------------------


@_defect("an answer that takes too long wedges its group", covering=True)
def _straggler_wedges_its_group() -> list[Patch]:
    original = Deadlines.set

    def set_(self: Deadlines, wait: Wait, end_s: float) -> None:
        if wait.what != "answer":
            original(self, wait, end_s)

    return [(Deadlines, "set", set_)]


@_defect("an answer that arrives after its retry is counted as well", covering=True)
def _late_answer_counts_twice() -> list[Patch]:
    def end_task(self: RunState, number: int) -> Any:
        task = self.tasks[number]
        self.workers[task.worker].tasks.discard(number)
        return task

    return [(RunState, "end_task", end_task)]


@_defect("the rows of an answer that is told twice are thrown away")
def _second_copy_discards_the_first() -> list[Patch]:
    original = schedule.Schedule._handle

    def handle(self: schedule.Schedule, event: Any) -> None:
        known = (
            event.__class__.__name__ == "Answered" and event.task in self._state.kept
        )
        original(self, event)
        if known:
            self._discard(event.task)

    return [(schedule.Schedule, "_handle", handle)]


@_defect("what nobody waits for any more stays in memory")
def _late_rows_are_kept() -> list[Patch]:
    def discard(self: schedule.Schedule, rows: int) -> None:
        pass

    return [(schedule.Schedule, "_discard", discard)]


@_defect("messages of a process that was replaced count", covering=True)
def _old_incarnations_count() -> list[Patch]:
    def is_current(self: Workforce, worker: Any, incarnation: int) -> bool:
        phase = self._records[worker].phase
        return phase in (WorkerPhase.STARTING, WorkerPhase.READY)

    return [(Workforce, "is_current", is_current)]


@_defect("a prompt that cannot be scored is tried for ever", covering=True)
def _tries_without_end() -> list[Patch]:
    def count_failure(self: sampling.Sampling, task: Any, reason: str) -> None:
        task.answer.failures += 1

    return [(sampling.Sampling, "_count_failure", count_failure)]


@_defect("a group is dropped at its first failure")
def _dropped_at_the_first_failure() -> list[Patch]:
    def count_failure(self: sampling.Sampling, task: Any, reason: str) -> None:
        task.answer.failures += 1
        drops.drop_group(self._state, task.group, reason)

    return [(sampling.Sampling, "_count_failure", count_failure)]


@_defect("a group is dropped without a report", covering=True)
def _drop_without_report() -> list[Patch]:
    original = drops.drop_group

    def drop_group(state: RunState, group: Group, reason: str) -> None:
        original(state, group, reason)
        kept = [a for a in state.actions if not isinstance(a, act.DropGroup)]
        state.actions[:] = kept

    return [(sampling, "drop_group", drop_group), (drops, "drop_group", drop_group)]


@_defect("workers go on with answers of groups that were dropped")
def _dropped_answers_go_on() -> list[Patch]:
    def stop_tasks(state: RunState, group: Group | None = None) -> None:
        pass

    return [(drops, "stop_tasks", stop_tasks)]


# --- workers that fail ----------------------------------------------------------------


@_defect("a waiter is left waiting after the death of its peer", covering=True)
def _waiter_left_behind() -> list[Patch]:
    original = sampling.Sampling.lose

    def lose(self: sampling.Sampling, number: int, reason: str) -> None:
        if "failed" not in reason:
            original(self, number, reason)

    return [(sampling.Sampling, "lose", lose)]


@_defect("the ranks of the trainer wait for one that has died")
def _ranks_wait_for_a_dead_one() -> list[Patch]:
    original = failures.Failures.fail

    def fail(self: failures.Failures, worker: Any, reason: str) -> None:
        if worker != TRAINER:
            original(self, worker, reason)

    def set_(self: Deadlines, wait: Wait, end_s: float) -> None:
        if wait.what not in ("step", "save"):
            original_set(self, wait, end_s)

    original_set = Deadlines.set
    return [(failures.Failures, "fail", fail), (Deadlines, "set", set_)]


@_defect("the restarts of a worker are counted over its whole life", covering=True)
def _restart_budget_never_reset() -> list[Patch]:
    def keeping(original: Any) -> Any:
        def wrapped(self: Any, event: Any) -> Any:
            records = list(self._state.workers)
            before = [record.failures_in_row for record in records]
            result = original(self, event)
            for record, count in zip(records, before, strict=True):
                record.failures_in_row = count
            return result

        return wrapped

    parts = sampling.Sampling, training.Training
    names = (parts[0], "answered"), (parts[0], "scored"), (parts[1], "step_trained")
    return [(cls, name, keeping(getattr(cls, name))) for cls, name in names]


@_defect("a worker that cannot start is started for ever")
def _restarts_without_end() -> list[Patch]:
    original = RestartPolicy.pause_before

    def pause_before(self: RestartPolicy, failures_in_row: int) -> float | None:
        return original(self, min(failures_in_row, self.max_restarts))

    return [(RestartPolicy, "pause_before", pause_before)]


@_defect("a step that always fails looks like progress after each rollback")
def _rollback_looks_like_progress() -> list[Patch]:
    original = training.Training.step_trained

    def step_trained(self: training.Training, event: Any) -> None:
        self._state.furthest_step = min(self._state.furthest_step, self._state.step)
        original(self, event)

    return [(training.Training, "step_trained", step_trained)]


@_defect("a worker that hangs is given its next piece of work")
def _hung_worker_is_trusted() -> list[Patch]:
    def overdue(self: failures.Failures, worker: Any, wait: Wait) -> None:
        if wait.number in self._state.tasks:
            self._sampling.cancel(wait.number, f"{worker} took too long")

    return [(failures.Failures, "_overdue", overdue)]


@_defect("a worker that is slow with one answer is ended with all others")
def _slow_worker_is_ended() -> list[Patch]:
    def overdue(self: failures.Failures, worker: Any, wait: Wait) -> None:
        if wait.number in self._state.tasks:
            self._sampling.cancel(wait.number, f"{worker} took too long")
            self.fail(worker, "an answer took too long")

    return [(failures.Failures, "_overdue", overdue)]


@_defect("a generator is waited for that has to confirm weights of a dead trainer")
def _waits_for_withdrawn_weights() -> list[Patch]:
    original = training.Training.abandon

    def abandon(self: training.Training) -> None:
        deadlines = self._state.deadlines
        ends = {w: end for w, end in deadlines._ends.items() if w.what == "load"}
        original(self)
        deadlines._ends |= ends

    return [(training.Training, "abandon", abandon)]


@_defect("the groups that a trainer worked on are forgotten with it")
def _groups_of_a_lost_trainer() -> list[Patch]:
    original = training.Training.abandon

    def abandon(self: training.Training) -> None:
        self._state.in_training = []
        original(self)

    return [(training.Training, "abandon", abandon)]


@_defect("answers of weights that are gone are trained on", covering=True)
def _answers_of_weights_that_are_gone() -> list[Patch]:
    original = going_back._still_counts

    def still_counts(state: RunState, answer: Answer, *args: Any) -> bool:
        if answer.phase in (AnswerPhase.UNSENT, AnswerPhase.SAMPLING):
            return original(state, answer, *args)
        return True

    return [(going_back, "_still_counts", still_counts)]


@_defect("a generator with weights that are gone finishes its answers")
def _weights_that_are_gone_go_on_sampling() -> list[Patch]:
    original = going_back._still_counts

    def still_counts(state: RunState, answer: Answer, *args: Any) -> bool:
        _, _, seed_attempt = args
        is_same = answer.seed_attempt == seed_attempt
        is_sampling = answer.phase is AnswerPhase.SAMPLING and is_same
        return is_sampling or original(state, answer, *args)

    return [(going_back, "_still_counts", still_counts)]


@_defect("all that is in flight is given up with a trainer", covering=True)
def _in_flight_is_given_up() -> list[Patch]:
    def still_counts(*args: Any) -> bool:
        return False

    return [(going_back, "_still_counts", still_counts)]


@_defect("prompts of lost steps are not drawn again", covering=True)
def _prompts_of_lost_steps_are_lost() -> list[Patch]:
    original = going_back.go_back

    def go_back(state: RunState, saved: Any) -> None:
        position = state.order.position
        original(state, saved)
        state.order.position = max(position, state.order.position)

    return [(training, "go_back", go_back)]


@_defect("prompts that are held are drawn again as the trainer is back")
def _held_prompts_are_drawn_again() -> list[Patch]:
    original = going_back._keep_later

    def keep_later(state: RunState, held: dict[int, Group]) -> None:
        position = state.order.position
        original(state, held)
        state.order.position = position

    return [(going_back, "_keep_later", keep_later)]


@_defect("answers under way cannot be explained by withdrawn weights")
def _withdrawn_weights_explain_nothing() -> list[Patch]:
    original = WeightVersions.withdraw

    def withdraw(self: WeightVersions) -> None:
        original(self)
        self._former.clear()

    return [(WeightVersions, "withdraw", withdraw)]


# --- checkpoints ----------------------------------------------------------------------


@_defect("a checkpoint lacks the prompts that are being sampled", covering=True)
def _checkpoint_without_prompts_in_flight() -> list[Patch]:
    original = checkpoint_state.to_dict

    def to_dict(state: RunState) -> Any:
        saved = original(state)
        groups = [entry for entry in saved["groups"] if "answers" in entry]
        return {**saved, "groups": groups}

    return [(training, "to_dict", to_dict)]


@_defect("a checkpoint lacks the groups that wait for their step")
def _checkpoint_without_the_buffer() -> list[Patch]:
    original = checkpoint_state.to_dict

    def to_dict(state: RunState) -> Any:
        saved = original(state)
        groups = [entry for entry in saved["groups"] if "answers" not in entry]
        return {**saved, "groups": groups}

    return [(training, "to_dict", to_dict)]


@_defect("a checkpoint has answers as scored that wait for their reward")
def _checkpoint_with_unscored_answers() -> list[Patch]:
    original = checkpoint_state._answer_to_dict

    def answer_to_dict(answer: Any) -> Any:
        if answer.rows is None or answer.phase is AnswerPhase.SCORED:
            return original(answer)
        names = ("rows", "oldest_version", "newest_version", "num_tokens", "reward")
        return {name: getattr(answer, name) for name in names}

    return [(checkpoint_state, "_answer_to_dict", answer_to_dict)]


@_defect("answers of a checkpoint lose the version that sampled them", covering=True)
def _restored_answers_count_as_new() -> list[Patch]:
    original = checkpoint_state._group_of

    def group_of(state: RunState, entry: Any) -> Group:
        group: Group = original(state, entry)
        for answer in group.answers:
            if answer.rows is not None:
                answer.oldest_version = state.step
        return group

    return [(checkpoint_state, "_group_of", group_of)]


@_defect("a step begins while the checkpoint before it is written", covering=True)
def _step_during_a_checkpoint() -> list[Patch]:
    original = training.Training._save

    def save(self: training.Training, incarnation: int) -> None:
        original(self, incarnation)
        self._state.saving, self._state.saved_step = False, self._state.step

    return [(training.Training, "_save", save)]


@_defect("the run ends without a checkpoint of its last step")
def _end_is_not_saved() -> list[Patch]:
    original = training.Training._save_is_due

    def save_is_due(self: training.Training, over: str | None) -> bool:
        return over is None and original(self, over)

    return [(training.Training, "_save_is_due", save_is_due)]


@_defect("answers that are resumed forget which seeds have failed")
def _resume_forgets_seeds() -> list[Patch]:
    original = checkpoint_state.restore

    def restore(state: RunState, saved: Any, *held: Any) -> None:
        groups = [
            {**entry, "seed_attempts": [0] * len(entry["seed_attempts"])}
            for entry in saved["groups"]
        ]
        original(state, {**saved, "groups": groups})

    return [(schedule, "restore", restore), (going_back, "restore", restore)]
