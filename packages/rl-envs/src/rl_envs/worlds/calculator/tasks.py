"""Calculator tasks, such as "2+3*4=" with the answer "14"."""

from __future__ import annotations

import random

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource
from rl_envs.worlds.calculator.environment import calculate

__all__ = ["CalculatorTasks"]

_OPERATORS = "+-*"


@register_task_source("calculator")
class CalculatorTasks(TaskSource):
    """Generates expressions to compute.

    Args:
        num_terms: Number of terms in each expression.
        max_number: Largest number; the smallest is 0.
        operators: Some of `+`, `-` and `*`.
        suffix: Text at the end of the prompt.
        seed: Seed of the samples.
        held_out_fraction: Share of all prompts that are held out.

    Raises:
        TaskError: A number is too small, or an operator unknown.
    """

    def __init__(
        self,
        num_terms: int = 2,
        *,
        max_number: int = 9,
        operators: str = _OPERATORS,
        suffix: str = "=",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("calculator", seed=seed, held_out_fraction=held_out_fraction)
        if num_terms < 1 or max_number < 1:
            raise TaskError(
                "num_terms and max_number must be at least 1: got "
                f"{num_terms} and {max_number}"
            )
        if not operators or set(operators) - set(_OPERATORS):
            raise TaskError(
                f"operators must be some of {_OPERATORS!r}: got {operators!r}"
            )
        self.num_terms = num_terms
        self.max_number = max_number
        self.operators = operators
        self.suffix = suffix

    def propose(self, rng: random.Random) -> Task:
        """Draw numbers and the operators between them."""
        text = str(rng.randint(0, self.max_number))
        for _ in range(self.num_terms - 1):
            text += rng.choice(self.operators) + str(rng.randint(0, self.max_number))
        return Task(prompt=text + self.suffix, answer=str(calculate(text)))

    @property
    def alphabet(self) -> str:
        """All distinct characters of prompts, answers and calls in brackets."""
        return "".join(dict.fromkeys(f"0123456789{_OPERATORS}[]{self.suffix}"))
