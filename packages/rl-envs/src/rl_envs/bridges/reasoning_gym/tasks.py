"""Tasks of Reasoning Gym: families by name, at a level of their curricula."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl_distributed.suggestion import did_you_mean
from rl_envs.bridges.reasoning_gym.families import SERVER, TaskSpec, task_columns
from rl_envs.errors import TaskError
from rl_envs.limited_calls import LimitedCalls
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice

__all__ = ["ReasoningGymTasks"]

_INSTRUCTION = "\nWrite the answer as <answer>...</answer>."


@register_task_source("reasoning_gym")
class ReasoningGymTasks(TaskSource):
    """Draws tasks of one family or several, each by its own generator.

    Which part a task belongs to follows from its question alone, blanks and case aside:
    a question that two families, levels or seeds make is in one part for all of them.

    Args:
        family: A name, or several, which are drawn alike; a mapping gives weights.
            `"all"`: every family.
        level: Level of the curriculum, from 0, for each of its attributes; those with
            fewer levels stay at their highest. None: the family's own settings.
        levels: Level by attribute; it wins over `level`.
        settings: Settings of the family; they win over levels.
        style: `words`: the question, and that the answer goes between tags. `bare`:
            the question alone.
        seed: Which of the possible samples is drawn.
        held_out_fraction: Share of all questions that are held out.
        make_deadline_s: Seconds that making one task may take.

    Raises:
        TaskError: There is no such family, level, attribute or style.
        ConfigError: The package is not installed.
    """

    def __init__(
        self,
        family: str | Sequence[str] | Mapping[str, float] = "chain_sum",
        *,
        level: int | None = None,
        levels: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        style: Literal["words", "bare"] = "words",
        seed: int = 0,
        held_out_fraction: float = 0.1,
        make_deadline_s: float = 30.0,
    ) -> None:
        super().__init__(
            "reasoning_gym", seed=seed, held_out_fraction=held_out_fraction
        )
        check_choice("style", style, "words", "bare")
        if level is not None and (type(level) is not int or level < 0):
            raise TaskError(f"level must be a whole number from 0: got {level!r}")
        # One process: tasks are proposed one at a time.
        self._calls = LimitedCalls(SERVER, 1, make_deadline_s)
        self.family, self.level, self.style = family, level, style
        self.levels, self.settings = dict(levels or {}), dict(settings or {})
        self.make_deadline_s = make_deadline_s
        self._weights = self._read_families(family)

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes cannot be pickled; a copy starts its own.
        return _make, (self._arguments(),)

    def _arguments(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "level": self.level,
            "levels": self.levels,
            "settings": self.settings,
            "style": self.style,
            "seed": self.seed,
            "held_out_fraction": self.held_out_fraction,
            "make_deadline_s": self.make_deadline_s,
        }

    def _read_families(self, given: Any) -> dict[str, float]:
        known = self.families()
        if given == "all":
            return dict.fromkeys(known, 1.0)
        names = [given] if isinstance(given, str) else list(given or ())
        weights = (
            dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, 1.0)
        )
        for name, weight in weights.items():
            if name not in known:
                raise TaskError(
                    f"unknown family {name!r} of Reasoning Gym"
                    f"{did_you_mean(str(name), list(known))} (there are {len(known)}; "
                    "ReasoningGymTasks().families() names them)"
                )
            if not isinstance(weight, int | float) or not weight > 0:
                raise TaskError(
                    f"the weight of family {name!r} must be positive: got {weight!r}"
                )
        if not weights:
            raise TaskError("family must name at least one family: got none")
        return weights

    def families(self) -> dict[str, bool]:
        """Return all families by name: whether they have a curriculum."""
        found: dict[str, bool] = self._ask({"do": "list"})["families"]
        return found

    def curriculum(self, family: str) -> dict[str, list[str]]:
        """Return the values of each attribute that has levels, easiest first.

        Args:
            family: Its name.
        """
        found = self._ask({"do": "levels", "task": {"family": family}})
        return dict(found["levels"] or {})

    @property
    def max_level(self) -> int:
        """The level above which nothing gets harder; 0 without a curriculum."""
        values = [v for name in self._weights for v in self.curriculum(name).values()]
        return max((len(levels) - 1 for levels in values), default=0)

    def raised(self, by: int = 1) -> ReasoningGymTasks:
        """Return the same tasks at a higher level, `max_level` at most.

        Args:
            by: Levels to go up; from no level, the first is 0.
        """
        now = -1 if self.level is None else self.level
        level = min(now + by, self.max_level)
        return ReasoningGymTasks(**{**self._arguments(), "level": level})

    def propose(self, rng: random.Random) -> Task:
        """Make a task of a family that is drawn by its weight.

        Raises:
            TaskError: The family cannot make one with these settings.
        """
        names, weights = list(self._weights), list(self._weights.values())
        name = rng.choices(names, weights)[0] if len(names) > 1 else names[0]
        return self._task_of(name, rng.randrange(2**31))

    def _task_of(self, family: str, seed: int) -> Task:
        task: TaskSpec = {
            "family": family,
            "seed": seed,
            "level": self.level,
            "levels": self.levels,
            "settings": self.settings,
        }
        made = self._ask({"do": "make", "task": task})
        question = str(made["question"])
        prompt = question if self.style == "bare" else question + _INSTRUCTION
        columns = task_columns(task, made["digest"])
        return Task(prompt, made["answer"], columns)

    def key(self, task: Task) -> str:
        """Return the question, with blanks and case made alike."""
        question = task.prompt.removesuffix(_INSTRUCTION)
        return " ".join(question.casefold().split())

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        [reply] = self._calls.ask([request])
        if reply is None:
            family = request.get("task", {}).get("family", "")
            raise TaskError(
                f"family {family!r} of Reasoning Gym made no task in time; make it "
                "easier by settings, or raise make_deadline_s"
            )
        if "unreadable" in reply:
            raise TaskError(f"reasoning_gym: {reply['unreadable']}")
        return reply


def _make(arguments: Mapping[str, Any]) -> ReasoningGymTasks:
    return ReasoningGymTasks(**arguments)
