"""`RunState`: everything that the schedule knows, composed of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_algorithms.asynchronous.actions import Action, Fail, Finish
from rl_algorithms.asynchronous.buffer import GroupBuffer
from rl_algorithms.asynchronous.deadlines import Deadlines, Wait
from rl_algorithms.asynchronous.groups import Answer, Group
from rl_algorithms.asynchronous.prompt_order import PromptOrder
from rl_algorithms.asynchronous.settings import ScheduleSettings
from rl_algorithms.asynchronous.staleness import StalenessRule
from rl_algorithms.asynchronous.weight_versions import WeightVersions
from rl_algorithms.asynchronous.workers import Worker, Workforce

__all__ = ["RunState", "Task"]


@dataclass(slots=True)
class Task:
    """A piece of work given to a generator or an environment."""

    group: Group
    answer: Answer
    worker: Worker
    wait: Wait
    """What its deadline is set for."""


class RunState:
    """State shared by the parts of a schedule, which change it one after another.

    Args:
        settings: Settings of the schedule.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.has_begun = False
        self.step = 0
        """Number of completed steps, hence the index of the next one."""
        self.furthest_step = 0
        """Largest number of steps ever completed, by whichever trainer."""
        self.saved_step: int | None = None
        """Number of completed steps in the newest complete checkpoint."""
        self.saving = False
        self.is_paused = False
        """Whether the trainer is held on purpose, and no step is expected of it."""
        self.in_training: list[Group] = []
        self.order = PromptOrder(settings.prompts_per_epoch, settings.max_num_epochs)
        rule = StalenessRule(
            settings.max_staleness,
            settings.num_prompts_per_step,
            settings.max_num_steps,
        )
        self.buffer = GroupBuffer(rule)
        self.versions = WeightVersions(settings.weight_updates)
        self.workers = Workforce(settings.num_generators, settings.num_environments)
        self.deadlines = Deadlines()
        self.tasks: dict[int, Task] = {}
        """Tasks in flight, by number."""
        self.kept: set[int] = set()
        """Sampling tasks whose rows the driver keeps."""
        self.num_tasks = 0
        """Number of the next task; never decreases while the driver lives."""
        self.drops_in_row = 0
        self.stop_reason: str | None = None
        self.end: Finish | Fail | None = None
        self.actions: list[Action] = []

    @property
    def next_step(self) -> int:
        """Index of the step that can take the first waiting group."""
        return self.step + 1 if self.in_training else self.step

    @property
    def num_groups(self) -> int:
        """Number of groups being sampled, waiting for their step or in it."""
        return len(self.buffer) + len(self.in_training)

    @property
    def over(self) -> str | None:
        """Why no further step will begin; None if one will."""
        if self.stop_reason is not None:
            return self.stop_reason
        limit = self.settings.max_num_steps
        if limit is not None and self.step >= limit:
            return f"max_num_steps ({limit}) reached"
        if self.order.is_used_up and not self.num_groups:
            return f"max_num_epochs ({self.settings.max_num_epochs}) reached"
        return None

    def new_task(
        self,
        group: Group,
        answer: Answer,
        worker: Worker,
        what: Literal["answer", "score"],
        limit_s: float,
    ) -> int:
        """Register a task with its deadline, and return its number."""
        number = self.num_tasks
        self.num_tasks += 1
        wait = Wait(what, worker, number)
        self.tasks[number] = Task(group, answer, worker, wait)
        self.workers[worker].tasks.add(number)
        self.deadlines.set(wait, self.now_s + limit_s)
        return number

    def end_task(self, number: int) -> Task:
        """Remove a task from those in flight and return it."""
        task = self.tasks.pop(number)
        self.workers[task.worker].tasks.discard(number)
        return task

    def drop_task(self, number: int) -> Task:
        """Remove a task from those in flight, with its deadline, and return it."""
        task = self.end_task(number)
        self.deadlines.clear(task.wait)
        return task

    def admit(self, group: Group) -> None:
        """Add a group to the buffer, with the rows that the driver keeps for it."""
        self.buffer.add(group)
        self.kept.update(group.rows)

    def finish(self, action: Finish | Fail) -> None:
        """End the run."""
        # The first reason stands: later ones are consequences of it.
        if self.end is None:
            self.end = action
            self.actions.append(action)
