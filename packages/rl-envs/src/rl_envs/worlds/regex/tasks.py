"""Regex tasks, such as "[ab]x{3}=" with the answer "axxx" or "bxxx"."""

from __future__ import annotations

import random
import string

from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, check_range

__all__ = ["RegexTasks"]

_LETTERS = string.ascii_lowercase
_WORD_LENGTH = 3


@register_task_source("regex")
class RegexTasks(TaskSource):
    """Generates expressions and a text that each matches as a whole.

    An expression is a sequence of parts: letters and digits (`b7`), one of two letters
    (`[ab]`), repetitions (`x{3}`, `[ab]{3}`) and one of two words (`(cat|dog)`). Its
    first part is never plain, so that an expression does not match itself.

    Args:
        num_parts: Number of parts, 1 to 20.
        max_repeats: Maximum number of repetitions, 2 to 9.
        style: `compact`: "[ab]x{3}=". `words`: a sentence that asks for the text
            between `<answer>` and `</answer>`.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A size or the style is invalid.
    """

    def __init__(
        self,
        num_parts: int = 3,
        *,
        max_repeats: int = 4,
        style: str = "compact",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("regex", seed=seed, held_out_fraction=held_out_fraction)
        check_range("num_parts", num_parts, 1, 20)
        check_range("max_repeats", max_repeats, 2, 9)
        check_choice("style", style, "compact", "words")
        self.num_parts, self.max_repeats, self.style = num_parts, max_repeats, style

    def propose(self, rng: random.Random) -> Task:
        """Draw parts, each with a text that it matches."""
        parts = [self._pattern_part(rng)]
        for _ in range(self.num_parts - 1):
            plain = rng.random() < 0.5
            parts.append(_plain(rng) if plain else self._pattern_part(rng))
        pattern = "".join(pattern for pattern, _ in parts)
        return Task(
            prompt=self._prompt(pattern),
            answer="".join(text for _, text in parts),
            metadata={"pattern": pattern},
        )

    def _pattern_part(self, rng: random.Random) -> tuple[str, str]:
        """Return a part that is not plain, and a text for it."""
        kind = rng.choice(["set", "repeat", "set repeat", "words"])
        if kind == "words":
            words = ["".join(rng.sample(_LETTERS, _WORD_LENGTH)) for _ in range(2)]
            return f"({'|'.join(words)})", rng.choice(words)
        times = rng.randint(2, self.max_repeats)
        if kind == "repeat":
            letter = rng.choice(_LETTERS)
            return f"{letter}{{{times}}}", letter * times
        # Sorted: `[ab]` and `[ba]` are the same, and must share a split.
        letters = sorted(rng.sample(_LETTERS, 2))
        if kind == "set":
            return f"[{''.join(letters)}]", rng.choice(letters)
        text = "".join(rng.choice(letters) for _ in range(times))
        return f"[{''.join(letters)}]{{{times}}}", text

    def _prompt(self, pattern: str) -> str:
        if self.style == "compact":
            return f"{pattern}="
        return (
            f"Write a text that the regular expression {pattern} matches as a whole. "
            "Write it as <answer>...</answer>."
        )

    def key(self, task: Task) -> str:
        """Return the expression."""
        return str(task.metadata["pattern"])

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact prompts and their answers."""
        return _LETTERS + string.digits + "[](){}|="


def _plain(rng: random.Random) -> tuple[str, str]:
    letters = _LETTERS + string.digits
    text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 2)))
    return text, text
