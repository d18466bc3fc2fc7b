"""`examine_tasks`: each check passes correct input and finds one defect."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from rl_envs import CalculatorTasks, SortingTasks, Split, Task, TaskError, TaskSource
from rl_envs.testing import assert_passed, examine_tasks
from rl_envs.worlds.countdown import CountdownTasks


def failed(make: Callable[[int], TaskSource], num_tasks: int = 20) -> set[str]:
    found = examine_tasks(make, num_tasks)
    assert len(found) == 5
    return {finding.check for finding in found if finding.status == "fail"}


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: SortingTasks(4, seed=seed),
        lambda seed: CountdownTasks(seed=seed),
        lambda seed: CalculatorTasks(seed=seed),
    ],
    ids=["sorting", "countdown", "calculator"],
)
def test_worlds_pass(make: Callable[[int], TaskSource]) -> None:
    assert_passed(examine_tasks(make, 20))


class Numbers(TaskSource):
    def __init__(self, seed: int = 0) -> None:
        super().__init__("numbers", seed=seed)

    def propose(self, rng: random.Random) -> Task:
        return Task(f"{rng.randrange(10**6)}+1=", "1")


class Unseeded(Numbers):
    def propose(self, rng: random.Random) -> Task:
        return super().propose(random.Random())


class WithoutSeed(Numbers):
    def __init__(self, seed: int) -> None:
        super().__init__(0)


class OneSplit(Numbers):
    """Draws from a few prompts, with a key that differs on each access."""

    numbers = itertools.count()

    def propose(self, rng: random.Random) -> Task:
        return Task(f"{rng.randrange(4)}+1=", "1")

    def split_of(self, task: Task) -> Split:
        return random.Random(next(self.numbers)).choice(list(Split))


class Counting(Numbers):
    calls = 0

    def sample(self, split: Any, num_tasks: int, **named: Any) -> list[Task]:
        found = super().sample(split, num_tasks, **named)
        return found if num_tasks > 15 else found[::-1]


class WithFunction(Numbers):
    def propose(self, rng: random.Random) -> Task:
        task = super().propose(rng)
        return Task(task.prompt, task.answer, {"check": self.key})

    def __reduce__(self) -> Any:
        raise TypeError("this source stays here")


@pytest.mark.parametrize(
    ("make", "checks"),
    [
        (Numbers, set()),
        (Unseeded, {"same seed, same tasks", "shorter samples are prefixes"}),
        (WithoutSeed, {"other seed, other tasks"}),
        (Counting, {"shorter samples are prefixes"}),
    ],
)
def test_a_defect_of_a_source_is_found(make: Any, checks: set[str]) -> None:
    assert failed(make) == checks


def test_tasks_of_both_parts_are_found() -> None:
    assert "train and held-out are disjoint" in failed(OneSplit)


def test_rows_that_cannot_be_pickled_are_found() -> None:
    assert "rows cross processes" in failed(WithFunction)


def test_no_tasks_are_an_error() -> None:
    with pytest.raises(TaskError, match="num_tasks must be at least 1: got 0"):
        examine_tasks(Numbers, 0)
