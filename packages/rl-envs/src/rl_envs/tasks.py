"""Generated tasks with train and held-out splits that never overlap.

The split of a task is a property of the task itself: whether a stable hash of its key
is below a threshold. The splits are therefore disjoint for all seeds, sizes, processes
and releases, without any stored lists.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rl_envs.errors import TaskError

__all__ = [
    "Split",
    "Task",
    "TaskSource",
    "check_choice",
    "check_range",
    "settings_json",
    "split_of",
    "stable_fraction",
]

# Enough for a nearly exhausted split; beyond it the sample is impossible, and an
# endless loop would hide that.
_TRIES_PER_TASK = 200


class Split(StrEnum):
    """Split of the tasks of a world."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Task:
    """A question whose answer can be checked by a program."""

    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """Return a data set row: `prompt`, `answer` and the columns of the metadata."""
        return {"prompt": self.prompt, "answer": self.answer, **self.metadata}


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Check that a size is within its bounds, both included.

    Raises:
        TaskError: It is not.
    """
    if not low <= value <= high:
        raise TaskError(f"{name} must be {low} to {high}: got {value}")


def check_choice(name: str, value: str | None, *choices: str) -> None:
    """Check that a value is one of two or more.

    Raises:
        TaskError: It is not.
    """
    if value not in choices:
        *first, last = map(repr, choices)
        raise TaskError(f"{name} must be {', '.join(first)} or {last}: got {value!r}")


def settings_json(name: str, settings: Mapping[str, Any] | None) -> str:
    """Return settings as a JSON text, which can be a column and a key.

    The text is sorted, so that equal settings have equal texts.

    Raises:
        TaskError: They are not a mapping of JSON values.
    """
    try:
        return json.dumps(dict(settings or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{name} must be a mapping of JSON values: got {settings!r:.160}"
        ) from error


def stable_fraction(key: str, *, salt: str = "") -> float:
    """Map a text to [0, 1), uniformly and the same on every machine and process."""
    # Not `hash`, which is randomized per process.
    digest = hashlib.blake2b(
        key.encode(), digest_size=8, key=hashlib.blake2b(salt.encode()).digest()
    ).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(key: str, *, held_out_fraction: float, salt: str = "") -> Split:
    """Return the split that a task with this key belongs to."""
    # Salted by the world, so that equal keys of two worlds are split independently.
    below = stable_fraction(key, salt=salt) < held_out_fraction
    return Split.HELD_OUT if below else Split.TRAIN


class TaskSource(ABC):
    """Generates tasks of one world.

    Subclasses define how a random task is created (`propose`) and which tasks must
    share a split (`key`). All results depend on the arguments only.

    Args:
        world: Name of the world; it salts the split.
        seed: Seed of the samples.
        held_out_fraction: Share of all keys that are held out.

    Raises:
        TaskError: The fraction is not between 0 and 1.
    """

    def __init__(
        self, world: str, *, seed: int = 0, held_out_fraction: float = 0.1
    ) -> None:
        if not 0.0 < held_out_fraction < 1.0:
            raise TaskError(
                "held_out_fraction must lie between 0 and 1, both excluded: got "
                f"{held_out_fraction!r}"
            )
        self.world = world
        self.seed = seed
        self.held_out_fraction = held_out_fraction

    @abstractmethod
    def propose(self, rng: random.Random) -> Task:
        """Create a random task of either split."""

    def key(self, task: Task) -> str:
        """Return the key for the split; tasks with equal keys share a split."""
        return task.prompt

    def identity(self, task: Task) -> str:
        """Return the text by which tasks are compared if a sample must be `unique`."""
        return task.prompt

    def split_of(self, task: Task) -> Split:
        """Return the split that a task belongs to."""
        return split_of(
            self.key(task), held_out_fraction=self.held_out_fraction, salt=self.world
        )

    def sample(
        self,
        split: Split | str,
        num_tasks: int,
        *,
        stream: str = "",
        unique: bool = True,
    ) -> list[Task]:
        """Draw tasks of one split.

        With otherwise equal arguments, a longer sample begins with the shorter one.

        Args:
            split: The split.
            num_tasks: Number of tasks.
            stream: Name of an independent sequence; the same name gives the same tasks.
            unique: Exclude duplicates. Tasks are compared by their prompt, unless the
                world overrides `identity`.

        Raises:
            TaskError: The number is negative, or the split unknown or too small.
        """
        try:
            part = Split(split)
        except ValueError:
            raise TaskError(
                f"split must be one of {[s.value for s in Split]}: got {split!r}"
            ) from None
        if num_tasks < 0:
            raise TaskError(f"num_tasks must not be negative: got {num_tasks}")
        # Random hashes text seeds with SHA-512, so they do not depend on the process.
        rng = random.Random(f"{self.world}/{self.seed}/{part}/{stream}")
        tasks: list[Task] = []
        seen: set[str] = set()
        tries = 0
        while len(tasks) < num_tasks:
            if tries > _TRIES_PER_TASK * (num_tasks + 10) / self.held_out_fraction:
                raise TaskError(
                    f"the {part} split of {self.world!r} has too few different tasks: "
                    f"found {len(tasks)} of {num_tasks}; ask for fewer, make the tasks "
                    "larger, or pass unique=False"
                )
            tries += 1
            task = self.propose(rng)
            name = self.identity(task)
            if self.split_of(task) is not part or (unique and name in seen):
                continue
            seen.add(name)
            tasks.append(task)
        return tasks

    def train(self, num_tasks: int, *, unique: bool = True) -> list[dict[str, Any]]:
        """Return rows for training by sampling: prompts with a checkable answer."""
        return self._rows(Split.TRAIN, num_tasks, "train", unique)

    def demonstrations(
        self, num_tasks: int, *, unique: bool = True
    ) -> list[dict[str, Any]]:
        """Return rows to imitate, drawn independently from the train split."""
        return self._rows(Split.TRAIN, num_tasks, "demonstrations", unique)

    def held_out(self, num_tasks: int, *, unique: bool = True) -> list[dict[str, Any]]:
        """Return rows that are never trained on."""
        return self._rows(Split.HELD_OUT, num_tasks, "held_out", unique)

    def _rows(
        self, split: Split, num_tasks: int, stream: str, unique: bool
    ) -> list[dict[str, Any]]:
        tasks = self.sample(split, num_tasks, stream=stream, unique=unique)
        return [task.to_row() for task in tasks]
