"""Generated tasks with a train and a held-out part that never overlap.

Which part a task belongs to is a property of the task itself: a stable hash of its key
falls below a threshold or not. So the parts are disjoint for all seeds, sizes,
processes and releases, and nobody has to keep lists.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rl_envs.errors import TaskError

__all__ = ["Split", "Task", "TaskSource", "split_of", "stable_fraction"]

_TRIES_PER_TASK = 200


class Split(StrEnum):
    """A part of all tasks of a world."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Task:
    """A question that a program can check the answer of."""

    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """Return a row of a data set: `prompt`, `answer` and the metadata's columns."""
        return {"prompt": self.prompt, "answer": self.answer, **self.metadata}


def stable_fraction(key: str, *, salt: str = "") -> float:
    """Map a text to [0, 1), evenly, the same on every machine and in every process."""
    digest = hashlib.blake2b(
        key.encode(), digest_size=8, key=hashlib.blake2b(salt.encode()).digest()
    ).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(key: str, *, held_out_fraction: float, salt: str = "") -> Split:
    """Return the part that a task with this key belongs to."""
    below = stable_fraction(key, salt=salt) < held_out_fraction
    return Split.HELD_OUT if below else Split.TRAIN


class TaskSource(ABC):
    """Makes tasks of one world.

    A subclass says how a random task is made (`propose`) and what makes two tasks the
    same for the split (`key`). All results depend on the arguments only.

    Args:
        world: The world's name; it salts the split.
        seed: Which of the possible samples is drawn.
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
        """Make a random task of either part."""

    def key(self, task: Task) -> str:
        """Return what the split looks at; tasks of one key fall into one part."""
        return task.prompt

    def identity(self, task: Task) -> str:
        """Return what makes two tasks of a sample the same where `unique` is asked."""
        return task.prompt

    def split_of(self, task: Task) -> Split:
        """Return the part that a task belongs to."""
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
        """Draw tasks of one part.

        A longer sample begins with the shorter one of the same arguments.

        Args:
            split: The part.
            num_tasks: How many.
            stream: Name of an independent sequence; the same name, the same tasks.
            unique: Whether no task may come twice; tasks are told apart by their
                prompt, unless the world overrides `identity`.

        Raises:
            TaskError: The number is negative, or the part unknown or too small.
        """
        try:
            part = Split(split)
        except ValueError:
            raise TaskError(
                f"split must be one of {[s.value for s in Split]}: got {split!r}"
            ) from None
        if num_tasks < 0:
            raise TaskError(f"num_tasks must not be negative: got {num_tasks}")
        # Text seeds go through SHA-512, which no hash randomisation touches.
        rng = random.Random(f"{self.world}/{self.seed}/{part}/{stream}")
        tasks: list[Task] = []
        seen: set[str] = set()
        tries = 0
        while len(tasks) < num_tasks:
            if tries > _TRIES_PER_TASK * (num_tasks + 10) / self.held_out_fraction:
                raise TaskError(
                    f"the {part} part of {self.world!r} has too few different tasks: "
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
        """Return rows to train on by sampling: prompts with a checkable answer."""
        return self._rows(Split.TRAIN, num_tasks, "train", unique)

    def demonstrations(
        self, num_tasks: int, *, unique: bool = True
    ) -> list[dict[str, Any]]:
        """Return rows to imitate, drawn from the train part on their own."""
        return self._rows(Split.TRAIN, num_tasks, "demonstrations", unique)

    def held_out(self, num_tasks: int, *, unique: bool = True) -> list[dict[str, Any]]:
        """Return rows that are never trained on."""
        return self._rows(Split.HELD_OUT, num_tasks, "held_out", unique)

    def _rows(
        self, split: Split, num_tasks: int, stream: str, unique: bool
    ) -> list[dict[str, Any]]:
        tasks = self.sample(split, num_tasks, stream=stream, unique=unique)
        return [task.to_row() for task in tasks]
