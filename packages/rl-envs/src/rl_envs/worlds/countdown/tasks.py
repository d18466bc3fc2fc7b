"""Countdown tasks, such as "3 5 2>13=" with the answer "3+5*2" or any other way."""

from __future__ import annotations

import random

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, check_range

__all__ = ["CountdownTasks"]

# Most draws fail for fractions or large targets; a setting for which none works must
# become an error, not an endless loop.
_TRIES = 1000


@register_task_source("countdown")
class CountdownTasks(TaskSource):
    """Generates numbers and a target that can be reached with them.

    Every task has an answer, because it starts from a random expression whose steps are
    all positive whole numbers. The split depends on the sorted numbers and the target,
    so that a held-out task does not appear in training with its numbers in another
    order.

    Args:
        num_numbers: Number of numbers, 2 to 6.
        max_number: Largest number.
        max_target: Largest target.
        operators: Operators for generating tasks, some of `+-*/`; answers may use all.
        style: `compact`: "3 5 2>13=". `words`: a sentence that asks for the expression
            between `<answer>` and `</answer>`.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A size, an operator or the style is invalid.
    """

    def __init__(
        self,
        num_numbers: int = 3,
        *,
        max_number: int = 9,
        max_target: int = 99,
        operators: str = "+-*/",
        style: str = "compact",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("countdown", seed=seed, held_out_fraction=held_out_fraction)
        check_range("num_numbers", num_numbers, 2, 6)
        if max_number < 1 or max_target < 1:
            raise TaskError(
                "max_number and max_target must be at least 1: got "
                f"{max_number} and {max_target}"
            )
        if not operators or not set(operators) <= set("+-*/"):
            raise TaskError(f"operators must be some of '+-*/': got {operators!r}")
        check_choice("style", style, "compact", "words")
        self.num_numbers, self.max_number = num_numbers, max_number
        self.max_target, self.operators = max_target, operators
        self.style = style

    def propose(self, rng: random.Random) -> Task:
        """Draw numbers, then join pairs of values until one is left.

        Raises:
            TaskError: No target can be reached with such numbers.
        """
        for _ in range(_TRIES):
            numbers = [rng.randint(1, self.max_number) for _ in range(self.num_numbers)]
            found = self._joined(rng, numbers)
            if found is not None and found[0] <= self.max_target:
                target, answer = found
                return Task(
                    prompt=self._prompt(numbers, target),
                    answer=answer,
                    metadata={"numbers": numbers, "target": target},
                )
        raise TaskError(
            f"no target up to {self.max_target} was reached with {self.num_numbers} "
            f"numbers up to {self.max_number} and {self.operators!r}: raise max_target"
        )

    def _joined(self, rng: random.Random, numbers: list[int]) -> tuple[int, str] | None:
        """Return a value and its expression; None if a step is not a whole number."""
        # Value, text and precedence of each part: 0 a number, 1 a product, 2 a sum.
        parts = [(number, str(number), 0) for number in numbers]
        while len(parts) > 1:
            first, second = rng.sample(range(len(parts)), 2)
            (a, left, bind_a), (b, right, bind_b) = parts[first], parts[second]
            sign = rng.choice(self.operators)
            # Steps stay positive whole numbers, which people and small models can
            # follow.
            if (sign == "-" and a <= b) or (sign == "/" and a % b):
                return None
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
            binds = 1 if sign in "*/" else 2
            left = f"({left})" if bind_a > binds else left
            # A subtrahend or divisor of equal precedence needs brackets: a-(b-c).
            loose = bind_b > binds or (sign in "-/" and bind_b == binds)
            right = f"({right})" if loose else right
            rest = [p for i, p in enumerate(parts) if i not in (first, second)]
            parts = [*rest, (value, left + sign + right, binds)]
        return parts[0][0], parts[0][1]

    def _prompt(self, numbers: list[int], target: int) -> str:
        shown = " ".join(map(str, numbers))
        if self.style == "compact":
            return f"{shown}>{target}="
        return (
            f"Make {target} of the numbers {shown}, each exactly once, with + - * / "
            "and brackets. Write the expression as <answer>...</answer>."
        )

    def key(self, task: Task) -> str:
        """Return the sorted numbers and the target."""
        numbers = sorted(task.metadata["numbers"])
        return f"{numbers}>{task.metadata['target']}"

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact prompts and their answers."""
        return "0123456789 >=+-*/()"
