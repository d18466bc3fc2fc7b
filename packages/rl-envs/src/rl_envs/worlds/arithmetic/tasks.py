"""Arithmetic tasks, such as "12+34=" with the answer "46"."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, check_range

__all__ = ["ArithmeticTasks"]

# Most draws fail for negative or fractional values; a setting for which none works must
# become an error, not an endless loop.
_TRIES = 1000
_TRIES_FOR_DIVISOR = 50


class _Part(NamedTuple):
    """A subexpression."""

    value: int
    text: str
    binds: int
    """Precedence: 0 a number, 1 a product, 2 a sum."""


@register_task_source("arithmetic")
class ArithmeticTasks(TaskSource):
    """Generates expressions of whole numbers whose value is a whole number.

    Difficulty grows with the number of operands, their digits, the operators and the
    brackets. Each division is exact. The split depends on the sorted operands and the
    value, so that a held-out task does not appear in training in another order.

    Args:
        num_operands: Number of operands, 2 to 12.
        min_digits: Minimum number of digits of an operand.
        max_digits: Maximum number of digits, up to 12; each length is equally likely.
        operators: Operators that may occur, some of `+-*/`.
        brackets: Group operands at random, with the necessary brackets; False: no
            brackets, with the usual precedence.
        negative: Allow negative intermediate values and answers.
        style: `compact`: "12+34=". `words`: a sentence that asks for the number
            between `<answer>` and `</answer>`.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A size, an operator or the style is invalid.
    """

    def __init__(
        self,
        num_operands: int = 2,
        *,
        min_digits: int = 1,
        max_digits: int = 2,
        operators: str = "+-",
        brackets: bool = False,
        negative: bool = False,
        style: str = "compact",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("arithmetic", seed=seed, held_out_fraction=held_out_fraction)
        check_range("num_operands", num_operands, 2, 12)
        if not 1 <= min_digits <= max_digits <= 12:
            raise TaskError(
                "min_digits and max_digits must be 1 to 12, in order: got "
                f"{min_digits} and {max_digits}"
            )
        if not operators or not set(operators) <= set("+-*/"):
            raise TaskError(f"operators must be some of '+-*/': got {operators!r}")
        check_choice("style", style, "compact", "words")
        self.num_operands, self.operators = num_operands, operators
        self.min_digits, self.max_digits = min_digits, max_digits
        self.brackets, self.negative, self.style = brackets, negative, style

    def propose(self, rng: random.Random) -> Task:
        """Draw expressions until one has whole numbers in all its steps.

        Raises:
            TaskError: None was found.
        """
        make = self._grouped if self.brackets else self._flat
        for _ in range(_TRIES):
            part = make(rng, self.num_operands)
            if part is not None:
                return Task(
                    prompt=self._prompt(part.text),
                    answer=str(part.value),
                    metadata={"expression": part.text},
                )
        raise TaskError(
            f"no expression of {self.num_operands} operands with {self.operators!r} "
            "has whole numbers only: use fewer operands, or other operators too"
        )

    def _operand(self, rng: random.Random) -> _Part:
        low, high = _bounds(rng.randint(self.min_digits, self.max_digits))
        value = rng.randint(low, high)
        return _Part(value, str(value), 0)

    def _grouped(self, rng: random.Random, num_operands: int) -> _Part | None:
        if num_operands == 1:
            return self._operand(rng)
        num_left = rng.randint(1, num_operands - 1)
        left = self._grouped(rng, num_left)
        right = self._grouped(rng, num_operands - num_left)
        return self._joined(rng, rng.choice(self.operators), left, right)

    def _flat(self, rng: random.Random, num_operands: int) -> _Part | None:
        """Multiply and divide within terms, then add and subtract them in order."""
        terms: list[tuple[str, _Part | None]] = [("+", self._operand(rng))]
        for _ in range(num_operands - 1):
            sign, operand = rng.choice(self.operators), self._operand(rng)
            if sign in "*/":
                before, term = terms[-1]
                terms[-1] = before, self._joined(rng, sign, term, operand)
            else:
                terms.append((sign, operand))
        value = terms[0][1]
        for sign, term in terms[1:]:
            value = self._joined(rng, sign, value, term)
        return value

    def _joined(
        self, rng: random.Random, sign: str, left: _Part | None, right: _Part | None
    ) -> _Part | None:
        """Return both joined by the sign; None if the value is not a whole number."""
        if left is None or right is None:
            return None
        if sign == "/":
            left, right = self._divisible(rng, left, right)
            if right.value == 0 or left.value % right.value:
                return None
        a, b = left.value, right.value
        value = {"+": a + b, "-": a - b, "*": a * b}.get(sign)
        value = a // b if value is None else value
        if value < 0 and not self.negative:
            return None
        binds = 1 if sign in "*/" else 2
        first = f"({left.text})" if left.binds > binds else left.text
        # A subtrahend or divisor of equal precedence needs brackets: a-(b-c), a/(b*c).
        loose = right.binds > binds or (sign in "-/" and right.binds == binds)
        # So does a quotient that is multiplied: 6*(4/2) is not read as (6*4)/2.
        loose = loose or (sign == "*" and right.binds == 1 and "/" in right.text)
        second = f"({right.text})" if loose else right.text
        return _Part(value, first + sign + second, binds)

    def _divisible(
        self, rng: random.Random, left: _Part, right: _Part
    ) -> tuple[_Part, _Part]:
        """Redraw one side, if it is a single number, until the division is exact.

        Two independent numbers hardly ever divide each other.
        """
        if left.binds == 0 and right.value:
            _, high = _bounds(self.max_digits)
            low, _ = _bounds(self.min_digits)
            size = abs(right.value)
            # At least 1: dividing zero is trivial.
            fewest, most = max(1, -(-low // size)), high // size
            if fewest <= most:
                value = size * rng.randint(fewest, most)
                left = _Part(value, str(value), 0)
        elif right.binds == 0:
            for _ in range(_TRIES_FOR_DIVISOR):
                if right.value and left.value % right.value == 0:
                    break
                right = self._operand(rng)
        return left, right

    def _prompt(self, expression: str) -> str:
        if self.style == "compact":
            return f"{expression}="
        return f"Compute {expression}. Write the number as <answer>...</answer>."

    def key(self, task: Task) -> str:
        """Return the sorted operands and the value."""
        operands = sorted(map(int, re.findall("[0-9]+", task.metadata["expression"])))
        return f"{operands}={task.answer}"

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact prompts and their answers."""
        return "0123456789=+-*/()"


def _bounds(num_digits: int) -> tuple[int, int]:
    """Return the smallest and the largest number of a length; 0 has one digit."""
    return (10 ** (num_digits - 1) if num_digits > 1 else 0), 10**num_digits - 1
