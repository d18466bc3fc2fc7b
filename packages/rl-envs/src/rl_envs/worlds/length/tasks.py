"""Length tasks: bounds, and the only allowed words."""

from __future__ import annotations

import random

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, check_range

__all__ = ["LengthTasks"]

_WORDS = (
    "acorn", "beetle", "canyon", "dragon", "engine", "falcon", "garden", "hammer",
    "island", "jungle", "kettle", "ladder", "magnet", "needle", "ocean", "pepper",
    "rocket", "saddle", "temple", "umbrella", "valley", "window",
)  # fmt: skip
_UNITS = ("words", "characters", "sentences")
_WORDS_PER_SENTENCE = 3


@register_task_source("length")
class LengthTasks(TaskSource):
    """Asks for a text of given words with a length between two bounds.

    The given words prevent padding with arbitrary text. The split depends on the words
    and the bounds.

    Args:
        unit: `words`, `characters` or `sentences`.
        min_length: Minimum number of words or sentences; for `characters`, of the words
            from which the bounds follow.
        max_length: Maximum number, up to 200.
        slack: Distance between the two bounds; 0: the length is exact.
        num_words: Number of allowed words, 1 to 12.
        style: `compact`: "5 words: canyon ocean=". `words`: a sentence.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A number, the unit or the style is invalid.
    """

    def __init__(
        self,
        unit: str = "words",
        *,
        min_length: int = 2,
        max_length: int = 10,
        slack: int = 0,
        num_words: int = 3,
        style: str = "words",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("length", seed=seed, held_out_fraction=held_out_fraction)
        if unit not in _UNITS:
            raise TaskError(f"unit must be one of {', '.join(_UNITS)}: got {unit!r}")
        if not 1 <= min_length <= max_length <= 200:
            raise TaskError(
                "min_length and max_length must be 1 to 200, in order: got "
                f"{min_length} and {max_length}"
            )
        if slack < 0:
            raise TaskError(f"slack must not be negative: got {slack}")
        check_range("num_words", num_words, 1, 12)
        check_choice("style", style, "compact", "words")
        self.unit, self.slack, self.num_words = unit, slack, num_words
        self.min_length, self.max_length, self.style = min_length, max_length, style

    def propose(self, rng: random.Random) -> Task:
        """Draw words and a length, and compose a text of that length."""
        words = rng.sample(_WORDS, self.num_words)
        size = rng.randint(self.min_length, self.max_length)
        if self.unit == "sentences":
            answer = " ".join(_sentence(rng, words) for _ in range(size))
        else:
            answer = " ".join(rng.choices(words, k=size))
        length = len(answer) if self.unit == "characters" else size
        # Drawn below the answer's length, so that the bounds do not give it away but
        # hold it.
        low = max(1, length - rng.randint(0, self.slack))
        high = low + self.slack
        return Task(
            prompt=self._prompt(words, low, high),
            answer=answer,
            metadata={
                "length_unit": self.unit,
                "min_length": low,
                "max_length": high,
                "words": words,
            },
        )

    def _prompt(self, words: list[str], low: int, high: int) -> str:
        if self.style == "compact":
            bounds = str(low) if low == high else f"{low}-{high}"
            return f"{bounds} {self.unit}: {' '.join(words)}="
        bounds = f"exactly {low}" if low == high else f"{low} to {high}"
        return (
            f"Write a text of {bounds} {self.unit} that has no other words than "
            f"{', '.join(words)}. Each may occur any number of times, or not at all."
        )

    def key(self, task: Task) -> str:
        """Return the sorted words, the unit and the bounds."""
        row = task.metadata
        bounds = f"{row['min_length']}-{row['max_length']} {self.unit}"
        # Sorted: the order of the words changes the prompt, not the task.
        return f"{bounds}: {' '.join(sorted(row['words']))}"

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact prompts and their answers."""
        return "0123456789abcdefghijklmnopqrstuvwxyz -:.="


def _sentence(rng: random.Random, words: list[str]) -> str:
    return " ".join(rng.choices(words, k=rng.randint(1, _WORDS_PER_SENTENCE))) + "."
