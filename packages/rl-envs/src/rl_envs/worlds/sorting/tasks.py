"""Sorting tasks, such as "3128=" with the answer "1238"."""

from __future__ import annotations

import random

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource

__all__ = ["SortingTasks"]

_DIGITS = "0123456789"


@register_task_source("sorting")
class SortingTasks(TaskSource):
    """Generates digit strings to sort.

    The split depends on the sorted digits, so that neither a held-out prompt nor its
    answer appears in training, in any order.

    Args:
        num_digits: Number of digits in every task; None: between the two bounds.
        min_digits: Minimum number of digits, if `num_digits` is None.
        max_digits: Maximum number of digits, if `num_digits` is None.
        separator: Text between two digits, in prompt and answer.
        suffix: Text at the end of the prompt.
        seed: Seed of the samples.
        held_out_fraction: Share of all digit multisets that are held out.

    Raises:
        TaskError: The numbers of digits are invalid, or a text contains a digit.
    """

    def __init__(
        self,
        num_digits: int | None = None,
        *,
        min_digits: int | None = None,
        max_digits: int | None = None,
        separator: str = "",
        suffix: str = "=",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("sorting", seed=seed, held_out_fraction=held_out_fraction)
        if num_digits is not None:
            if min_digits is not None or max_digits is not None:
                raise TaskError(
                    "give num_digits, or min_digits and max_digits: got both "
                    f"({num_digits}, {min_digits}, {max_digits})"
                )
            min_digits = max_digits = num_digits
        elif min_digits is None or max_digits is None:
            raise TaskError("give num_digits, or both min_digits and max_digits")
        if not 1 <= min_digits <= max_digits:
            raise TaskError(
                "digits must satisfy 1 <= min_digits <= max_digits: got "
                f"{min_digits} and {max_digits}"
            )
        for name, text in (("separator", separator), ("suffix", suffix)):
            # A digit there could not be told from those to be sorted.
            if any(character.isdigit() for character in text):
                raise TaskError(f"{name} must not hold a digit: got {text!r}")
        self.min_digits = min_digits
        self.max_digits = max_digits
        self.separator = separator
        self.suffix = suffix

    def propose(self, rng: random.Random) -> Task:
        """Draw a length, then digits."""
        size = rng.randint(self.min_digits, self.max_digits)
        digits = rng.choices(_DIGITS, k=size)
        return Task(
            prompt=self.separator.join(digits) + self.suffix,
            answer=self.separator.join(sorted(digits)),
        )

    def key(self, task: Task) -> str:
        """Return the sorted digits."""
        return (
            task.answer.replace(self.separator, "") if self.separator else task.answer
        )

    @property
    def alphabet(self) -> str:
        """All distinct characters of prompts and answers."""
        return "".join(dict.fromkeys(_DIGITS + self.separator + self.suffix))

    @property
    def max_prompt_chars(self) -> int:
        """Length of the longest prompt."""
        return self.max_answer_chars + len(self.suffix)

    @property
    def max_answer_chars(self) -> int:
        """Length of the longest answer."""
        return self.max_digits + (self.max_digits - 1) * len(self.separator)
