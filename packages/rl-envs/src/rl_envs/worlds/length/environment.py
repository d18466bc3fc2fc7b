"""The length environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError
from rl_envs.registry import register_env
from rl_envs.worlds.length.units import counters, words_of
from rl_envs.worlds.verdict import (
    Columns,
    Given,
    Verdict,
    VerdictEnvironment,
    last_tagged,
    visible,
)

__all__ = ["LengthConfig", "LengthEnvironment", "LengthRow"]

# Maximum graded reward for a wrong length.
_NEAR = 0.9
# A shorter prompt may well occur in a good answer.
_LEAST_PROMPT_WORDS = 5


class LengthConfig(Config):
    """Settings of the length environment."""

    credit: Literal["exact", "graded"] = "exact"
    """Scoring of wrong lengths. `exact`: reward 1 within the bounds, else 0. `graded`:
    outside, 0.9 times (1 - distance to the nearer bound / that bound)."""
    unit: Literal["words", "characters", "sentences", "tokens"] = "words"
    """Unit of length for rows without a column `length_unit`."""
    min_length: int | None = Field(None, ge=0)
    """Minimum length for rows without bounds of their own."""
    max_length: int | None = Field(None, ge=1)
    """Maximum length for rows without bounds of their own."""
    tokenizer: str | None = None
    """`tokenizer.json`, or a folder with it, for the unit `tokens`."""
    min_distinct: float = Field(0.0, ge=0.0, le=1.0)
    """Minimum share of distinct words in a response, so that padding by repetition
    earns nothing."""


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Requirements of a row."""

    unit: str
    low: int
    high: int | None
    words: frozenset[str] | None = None
    """The only allowed words, in lower case; None: any."""


@register_env("length")
class LengthEnvironment(VerdictEnvironment[LengthRow]):
    """Counts the words, characters, sentences or tokens of a response.

    A row has the columns `min_length` and `max_length`, or one of them, and optionally
    `length_unit` and `words`, the only allowed words; the settings provide missing
    values. The answer is the content of the last `<answer>` tag or, without one, the
    response. Runs of blanks count as one, invisible characters do not count. An answer
    that is empty, or contains a prompt of five words or more, earns nothing.

    Args:
        config: The settings.

    Raises:
        ConfigError: The unit is `tokens`, and there is no tokenizer.
    """

    config_class = LengthConfig

    def __init__(self, config: LengthConfig | None = None) -> None:
        self.config = config or LengthConfig()
        self._is_graded = self.config.credit == "graded"
        self._bounds = self.config.min_length, self.config.max_length
        self._unit = self.config.unit
        self._min_distinct = self.config.min_distinct
        self._count = counters(self.config.tokenizer)
        if self._unit not in self._count:
            raise ConfigError(
                "tokenizer must be set if unit is 'tokens': got null; give a "
                "tokenizer.json or a folder with it"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # The counters are closures, which cannot be pickled.
        return type(self), (self.config,)

    def read_row(self, columns: Columns, row: int) -> LengthRow:
        """Return the unit, the bounds and the words.

        Raises:
            MessageLogError: A column is invalid, or there is no bound.
        """
        given = columns if isinstance(columns, Mapping) else {}
        unit = given.get("length_unit", self._unit)
        if unit not in self._count:
            raise MessageLogError(
                f"metadata[{row}]['length_unit'] must be one of "
                f"{', '.join(self._count)}: got {unit!r}"
                + ("; set tokenizer" if unit == "tokens" else "")
            )
        low, high = given.get("min_length"), given.get("max_length")
        if low is None and high is None:
            low, high = self._bounds
        # `type is int`, as True would pass for a length of 1.
        bounds = [bound for bound in (low, high) if bound is not None]
        whole = all(type(bound) is int and bound >= 0 for bound in bounds)
        if not bounds or not whole or bounds != sorted(bounds) or high == 0:
            raise MessageLogError(
                f"metadata[{row}] must have the columns 'min_length' and 'max_length', "
                "whole numbers in order, or one of them (or set them): got "
                f"{low!r} and {high!r}"
            )
        words = given.get("words")
        if words is not None and not _are_texts(words):
            raise MessageLogError(
                f"metadata[{row}]['words'] must be a list of words: got {words!r:.80}"
            )
        allowed = None if words is None else frozenset(map(str.lower, words))
        return LengthRow(str(unit), low or 0, high, allowed)

    def check(self, given: Given[LengthRow]) -> Verdict:
        """Check the length of a response, after rejecting padding."""
        tagged = last_tagged(given.response)
        answer = visible(given.response if tagged is None else tagged)
        wrong = self._padding(answer, given)
        if wrong:
            return Verdict(0.0, f"incorrect: {wrong}", answer)
        task = given.task
        length = self._count[task.unit](answer)
        if length >= task.low and (task.high is None or length <= task.high):
            return Verdict(1.0, "correct", answer)
        score = _NEAR * _nearness(length, task) if self._is_graded else 0.0
        wanted = _bounds_in_words(task)
        return Verdict(score, f"incorrect: {length} {task.unit}, not {wanted}", answer)

    def _padding(self, answer: str, given: Given[LengthRow]) -> str:
        """Return why a text is rejected, whatever its length; empty: it is not."""
        words = [word.lower() for word in words_of(answer)]
        if not words:
            return "it has no words"
        prompt = [word.lower() for word in words_of(given.prompt)]
        if len(prompt) >= _LEAST_PROMPT_WORDS and " ".join(prompt) in " ".join(words):
            return "it repeats the prompt"
        allowed = given.task.words
        if allowed is not None:
            for part in answer.split():
                # A part of punctuation only has no word, and is not allowed either.
                if words_of(part.lower()) and words_of(part.lower())[0] in allowed:
                    continue
                return f"{part!r:.60} is none of the words that may occur"
        if len(set(words)) < self._min_distinct * len(words):
            return f"only {len(set(words))} of {len(words)} words are different"
        return ""


def _nearness(length: int, task: LengthRow) -> float:
    bound = task.low if length < task.low else task.high or task.low
    return max(0.0, 1.0 - abs(length - bound) / bound)


def _bounds_in_words(task: LengthRow) -> str:
    if task.high is None:
        return f"at least {task.low}"
    return str(task.low) if task.low == task.high else f"{task.low} to {task.high}"


def _are_texts(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    return bool(is_list and given and all(isinstance(text, str) for text in given))
