"""Environments of verifiers loaded by the tests of the bridge."""

from __future__ import annotations

import os
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset


async def right(completion: Any, answer: str, **_: Any) -> float:
    return float(_last(completion) == answer)


async def length(completion: Any, **_: Any) -> float:
    return float(len(_last(completion)))


async def group(states: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in states]


def _last(completion: Any) -> str:
    message = completion[-1]
    content = message["content"] if isinstance(message, dict) else message.content
    return str(content).strip()


class TwoTries(vf.MultiTurnEnv):
    """Tells whether the first answer is correct, and asks again."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if _last(messages) == "die":
            os._exit(5)
        if _last(messages) == "raise":
            raise RuntimeError("the environment is broken")
        return [{"role": "user", "content": f"not {_last(messages)}; again"}]


def load_environment(
    kind: str = "single", largest: int = 9, metric: bool = True
) -> vf.Environment:
    # Text that an environment prints is not a reply of its process.
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    rows = [
        {"question": f"{first}+{second}=", "answer": str(first + second)}
        for first in range(largest + 1)
        for second in range(10)
    ]
    rubric = vf.Rubric(funcs=[right], weights=[1.0])
    if metric:
        rubric.add_metric(length)
    if kind == "group":
        rubric = vf.Rubric(funcs=[group], weights=[1.0])
    given = {"dataset": Dataset.from_list(rows), "rubric": rubric}
    if kind == "single":
        return vf.SingleTurnEnv(**given)
    return TwoTries(max_turns=2, **given)
