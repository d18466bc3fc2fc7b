"""`judge_answer`: compares the answer in a response with the solution.

```
solution --read_solution--> value ----------+
response --answers_in--> text --> value --- is_same --> Verdict
```
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import sympy

from rl_envs.mathematics.equality import is_same
from rl_envs.mathematics.extraction import answers_in, boxed_answer
from rl_envs.mathematics.reader import read_answer
from rl_envs.mathematics.values import (
    Group,
    Quantity,
    Relation,
    Unreadable,
    Value,
    Words,
)

__all__ = ["Verdict", "judge_answer", "read_solution"]

_SHOWN_CHARACTERS = 200
# Marks the final answer in solutions of GSM8K.
_GSM8K_MARK = "####"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one comparison."""

    correct: bool
    answer: str | None
    """Answer extracted from the response."""


def read_solution(text: str) -> Value:
    """Read a solution: a number, LaTeX, plain or Python notation, or words.

    In a text with `####` the part after the last one counts, in one with `\\boxed{}`
    its content.

    Raises:
        Unreadable: It cannot be read as a whole.
    """
    return read_answer(_solution_text(text))


def judge_answer(response: str, solution: str) -> Verdict:
    """Compare the last answer in a response with the solution.

    Args:
        response: Text; an answer in `\\boxed{}` takes precedence.
        solution: See `read_solution`.

    Raises:
        Unreadable: The solution cannot be read as a whole. An unreadable answer is just
            wrong.
    """
    # First: an unreadable solution must raise, whatever the response.
    gold = read_solution(solution)
    shown: str | None = None
    for text, is_marked in answers_in(response):
        if shown is None or not is_marked:
            shown = text.strip()[:_SHOWN_CHARACTERS]
        value = _read(text)
        if value is None:
            continue
        correct = is_same(gold, value)
        # Prose may be followed by the answer, unless the solution is in words.
        if correct or not _is_prose(value) or _has_words(gold):
            return Verdict(correct, _shown(value, text))
    return Verdict(False, shown or None)


def _solution_text(text: str) -> str:
    text = text.rpartition(_GSM8K_MARK)[2].strip()
    boxed = boxed_answer(text)
    return text if boxed is None else boxed


def _read(text: str) -> Value | None:
    try:
        return read_answer(text)
    except Unreadable:
        return None


def _shown(value: Value, text: str) -> str:
    """Return a canonical spelling of an answer, so that answers can be counted."""
    if isinstance(value, Relation) and isinstance(value.sides[0], sympy.Symbol):
        value = value.sides[-1]
    if isinstance(value, Quantity):
        value = value.value
    # Python refuses to print very long integers.
    with suppress(ValueError):
        if isinstance(value, sympy.Expr):
            text = str(value)
    return text.strip()[:_SHOWN_CHARACTERS]


def _is_prose(value: Value) -> bool:
    if isinstance(value, Group):
        return any(_is_prose(item) for item in value.items)
    return isinstance(value, Words)


def _has_words(value: Value) -> bool:
    if isinstance(value, Relation):
        return any(_has_words(side) for side in value.sides)
    return _is_prose(value)
