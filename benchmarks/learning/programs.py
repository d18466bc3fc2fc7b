"""Tasks for the environment `code`: small functions, described step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from rl_envs.tasks import Task, TaskSource

__all__ = ["ProgramTasks"]

_STEPS: Mapping[str, tuple[Callable[[int, int], int], str]] = {
    "add": (lambda x, n: x + n, "{x}+{n}"),
    "take": (lambda x, n: x - n, "{x}-{n}"),
    "times": (lambda x, n: x * n, "{x}*{n}"),
    "from": (lambda x, n: n - x, "{n}-{x}"),
}
_KEY_INPUTS = range(-9, 10)


class ProgramTasks(TaskSource):
    """Asks for the body of a function, such as `(x+3)*2` for "add 3, times 2".

    Rows have the form of HumanEval: `prompt` with the start of a function, which the
    response completes, `entry_point` and `test`. Tests with other inputs, which no
    prompt shows, are in `hidden_test`. Equivalent programs belong to the same split:
    held-out functions are never trained on, in whatever words.

    Args:
        num_steps: Number of steps of a function.
        inputs: Inputs of the tests of the reward.
        hidden_inputs: Inputs of the hidden tests.
        seed: Seed of the samples.
        held_out_fraction: Share of all functions that are held out.
    """

    def __init__(
        self,
        num_steps: int = 2,
        *,
        inputs: Sequence[int] = (0, 1, 5),
        hidden_inputs: Sequence[int] = (-3, 2, 4, 11),
        seed: int = 0,
        held_out_fraction: float = 0.2,
    ) -> None:
        super().__init__("programs", seed=seed, held_out_fraction=held_out_fraction)
        self.num_steps = num_steps
        self.inputs, self.hidden_inputs = tuple(inputs), tuple(hidden_inputs)

    def propose(self, rng: random.Random) -> Task:
        """Draw the steps of a function."""
        drawn = [
            (rng.choice(list(_STEPS)), rng.randint(2, 9)) for _ in range(self.num_steps)
        ]
        said = ", ".join(f"{name} {number}" for name, number in drawn)
        return Task(
            prompt=f"def f(x): # {said}\n return ",
            answer=_body(drawn),
            metadata={
                "entry_point": "f",
                "test": _test(drawn, self.inputs),
                "hidden_test": _test(drawn, self.hidden_inputs),
                "values": [_value(drawn, x) for x in _KEY_INPUTS],
            },
        )

    def key(self, task: Task) -> str:
        """Return what the function computes."""
        return str(task.metadata["values"])


def _value(steps: Sequence[tuple[str, int]], x: int) -> int:
    for name, number in steps:
        x = _STEPS[name][0](x, number)
    return x


def _body(steps: Sequence[tuple[str, int]]) -> str:
    body, is_sum = "x", False
    for name, number in steps:
        # Brackets only around a sum that is multiplied or subtracted.
        inner = f"({body})" if is_sum and name in ("times", "from") else body
        body, is_sum = _STEPS[name][1].format(x=inner, n=number), name != "times"
    return body


def _test(steps: Sequence[tuple[str, int]], inputs: Sequence[int]) -> str:
    lines = [f"    assert candidate({x}) == {_value(steps, x)}" for x in inputs]
    return "\n".join(["def check(candidate):", *lines])
