"""The arithmetic environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from rl_distributed.config import Config
from rl_envs.errors import MessageLogError
from rl_envs.registry import register_env
from rl_envs.worlds.verdict import (
    Columns,
    Given,
    Verdict,
    VerdictEnvironment,
    last_tagged,
)

__all__ = ["ArithmeticConfig", "ArithmeticEnvironment"]

# ASCII digits only, as `\d` matches those of all scripts. The limit keeps `int` fast
# and stays below the number of digits that Python refuses to convert.
_WHOLE = re.compile(r"[+-]?(?:[0-9]{1,1000}|[0-9]{1,3}(?:,[0-9]{3}){1,300})")
_MINUS = str.maketrans({"\u2212": "-"})
_WELL_FORMED = 0.1


class ArithmeticConfig(Config):
    """Settings of the arithmetic environment."""

    credit: Literal["exact", "graded"] = "exact"
    """Scoring of wrong answers. `exact`: reward 1 for the right number, else 0.
    `graded`: 0.1 for any other whole number."""


@register_env("arithmetic")
class ArithmeticEnvironment(VerdictEnvironment[int]):
    """Compares the whole number in a response with the row's; ends the conversation.

    A row has the column `answer`, a whole number or its digits. The answer of a
    response is the content of its last `<answer>` tag or, without one, its last line,
    without a leading `12+34=`. It must be one whole number and nothing else; a sign,
    leading zeros and commas between thousands are allowed.

    Args:
        config: The settings.
    """

    config_class = ArithmeticConfig

    def __init__(self, config: ArithmeticConfig | None = None) -> None:
        self.config = config or ArithmeticConfig()
        self._for_well_formed = _WELL_FORMED if self.config.credit == "graded" else 0.0

    def read_row(self, columns: Columns, row: int) -> int:
        """Return the right number.

        Raises:
            MessageLogError: The row has no whole number.
        """
        given = columns.get("answer") if isinstance(columns, Mapping) else None
        solution = _whole_number(given.strip()) if isinstance(given, str) else given
        # Not isinstance: True is an int, too.
        if type(solution) is not int:
            raise MessageLogError(
                f"metadata[{row}] must have the column 'answer', a whole number: got "
                f"{given!r:.80}"
            )
        return solution

    def check(self, given: Given[int]) -> Verdict:
        """Compare the number of a response with the right one."""
        answer = _answer_in(given.response)
        return Verdict(*self._judge(answer, given.task), answer)

    def _judge(self, answer: str, solution: int) -> tuple[float, str]:
        value = _whole_number(answer)
        if value is None:
            return 0.0, "incorrect: it must be one whole number"
        if value == solution:
            return 1.0, "correct"
        return self._for_well_formed, f"incorrect: it is not {solution}"


def _answer_in(response: str) -> str:
    tagged = last_tagged(response)
    lines = (response if tagged is None else tagged).strip().splitlines()
    return lines[-1].rpartition("=")[2].strip() if lines else ""


def _whole_number(text: str) -> int | None:
    plain = text.translate(_MINUS)
    return int(plain.replace(",", "")) if _WHOLE.fullmatch(plain) else None
