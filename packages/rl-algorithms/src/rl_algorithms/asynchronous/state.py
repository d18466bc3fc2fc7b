"""`RunState`: all that the schedule knows, put together of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from rl_algorithms.asynchronous.actions import Action, Fail, Finish
from rl_algorithms.asynchronous.buffer import GroupBuffer
from rl_algorithms.asynchronous.deadlines import Deadlines
from rl_algorithms.asynchronous.groups import Answer, Group
from rl_algorithms.asynchronous.prompt_order import PromptOrder
from rl_algorithms.asynchronous.settings import ScheduleSettings
from rl_algorithms.asynchronous.staleness import StalenessRule
from rl_algorithms.asynchronous.weight_versions import WeightVersions
from rl_algorithms.asynchronous.workers import Worker, Workforce

__all__ = ["RunState", "Task"]


@dataclass(slots=True)
class Task:
    """Something that a generator or an environment was asked to do."""

    group: Group
    answer: Answer
    worker: Worker
    sent_s: float


class RunState:
    """What the parts of a schedule share; they change it one after the other.

    Args:
        settings: What the schedule goes by.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.has_begun = False
        self.step = 0
        """Steps done, and so the number of the next one."""
        self.furthest_step = 0
        """The most steps that were done, also by a trainer that has failed since."""
        self.saved_step: int | None = None
        """Steps done in the newest complete checkpoint."""
        self.saving = False
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
        """What is under way, by number."""
        self.kept: set[int] = set()
        """Sampling tasks whose rows the driver keeps."""
        self.num_tasks = 0
        """Number of the next task; it never goes back while the driver lives."""
        self.drops_in_row = 0
        self.stop_reason: str | None = None
        self.end: Finish | Fail | None = None
        self.actions: list[Action] = []

    @property
    def next_step(self) -> int:
        """The step that can take the first group that waits."""
        return self.step + 1 if self.in_training else self.step

    @property
    def num_groups(self) -> int:
        """Groups that are sampled, wait for their step or are in it."""
        return len(self.buffer) + len(self.in_training)

    @property
    def over(self) -> str | None:
        """Why no further step will begin; None: one will."""
        if self.stop_reason is not None:
            return self.stop_reason
        limit = self.settings.max_num_steps
        if limit is not None and self.step >= limit:
            return f"max_num_steps ({limit}) reached"
        if self.order.is_used_up and not self.num_groups:
            return f"max_num_epochs ({self.settings.max_num_epochs}) reached"
        return None

    def new_task(self, task: Task) -> int:
        """Note what a worker is asked to do; return its number."""
        number = self.num_tasks
        self.num_tasks += 1
        self.tasks[number] = task
        self.workers[task.worker].tasks.add(number)
        return number

    def end_task(self, number: int) -> Task:
        """Wait for a task no longer, and return it."""
        task = self.tasks.pop(number)
        self.workers[task.worker].tasks.discard(number)
        return task

    def finish(self, action: Finish | Fail) -> None:
        """End the run."""
        if self.end is None:
            self.end = action
            self.actions.append(action)
