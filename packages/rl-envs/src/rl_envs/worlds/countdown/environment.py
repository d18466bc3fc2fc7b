"""The countdown environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from rl_distributed.config import Config
from rl_envs.errors import MessageLogError
from rl_envs.registry import register_env
from rl_envs.worlds.countdown.expressions import ExpressionError, read_expression
from rl_envs.worlds.verdict import (
    Columns,
    Given,
    Verdict,
    VerdictEnvironment,
    last_tagged,
)

__all__ = ["CountdownConfig", "CountdownEnvironment"]

CountdownRow: TypeAlias = tuple[Counter[int], int]
"""The numbers, and the target."""
_WELL_FORMED = 0.1


class CountdownConfig(Config):
    """Settings of the countdown environment."""

    credit: Literal["exact", "graded"] = "exact"
    """Scoring of wrong answers. `exact`: reward 1 for an expression that reaches the
    target, else 0. `graded`: 0.1 for one that uses the right numbers and misses it."""
    use_all: bool = True
    """Requirement to use every number; False: each may be used at most once."""


@register_env("countdown")
class CountdownEnvironment(VerdictEnvironment[CountdownRow]):
    """Evaluates the expression in a response exactly; ends the conversation.

    A row has the columns `numbers`, a list of whole numbers, and `target`. The answer
    is the content of the last `<answer>` tag or, without one, the last line, without a
    trailing `= target`. Each number must be used once and no other number may occur;
    intermediate fractions are exact.

    Args:
        config: The settings.
    """

    config_class = CountdownConfig

    def __init__(self, config: CountdownConfig | None = None) -> None:
        self.config = config or CountdownConfig()
        self._uses_all = self.config.use_all
        self._for_well_formed = _WELL_FORMED if self.config.credit == "graded" else 0.0

    def read_row(self, columns: Columns, row: int) -> CountdownRow:
        """Return the numbers and the target.

        Raises:
            MessageLogError: The row has no numbers or no target.
        """
        given = columns if isinstance(columns, Mapping) else {}
        numbers, target = given.get("numbers"), given.get("target")
        is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
        # Not isinstance: a bool would count as an int.
        whole = is_list and all(type(number) is int for number in numbers or ())
        if not whole or not numbers or type(target) is not int:
            raise MessageLogError(
                f"metadata[{row}] must have the columns 'numbers', a list of whole "
                f"numbers, and 'target', a whole number: got {numbers!r} and {target!r}"
            )
        return Counter(numbers), target

    def check(self, given: Given[CountdownRow]) -> Verdict:
        """Compute the expression of a response."""
        answer = _answer_in(given.response)
        return Verdict(*self._judge(answer, *given.task), answer)

    def _judge(
        self, answer: str, numbers: Counter[int], target: int
    ) -> tuple[float, str]:
        try:
            value, used = read_expression(answer)
        except ExpressionError as error:
            return 0.0, f"incorrect: {error}"
        # Counters: a number that is given twice may be used twice.
        fits = used == numbers if self._uses_all else used <= numbers
        if not fits:
            given = " ".join(map(str, sorted(numbers.elements())))
            return 0.0, f"incorrect: the numbers are {given}"
        if value == target:
            return 1.0, "correct"
        return self._for_well_formed, f"incorrect: it is {value}, not {target}"


def _answer_in(response: str) -> str:
    tagged = last_tagged(response)
    lines = (response if tagged is None else tagged).strip().splitlines()
    line = lines[-1] if lines else ""
    # Models like to end with "= target".
    return line.partition("=")[0].strip()
