"""Agent of the recipe `agents-gsm8k`: solves a word problem, then reviews its solution.

Any program that talks to a chat interface can take its place: set `env.settings.file`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rl_envs import AgentReward

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rl_envs import AgentTask

__all__ = ["agent"]

REVIEW = (
    "Check each step again. Then give the right final answer, also if it is the same, "
    "in \\boxed{}."
)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


async def agent(task: AgentTask, client: AsyncOpenAI) -> AgentReward:
    """Have the policy solve and review; reward 1 if the reviewed answer is right."""
    messages: list[Any] = list(task.messages)
    draft = await _ask(task, client, messages)
    messages += [
        {"role": "assistant", "content": draft},
        {"role": "user", "content": REVIEW},
    ]
    final = await _ask(task, client, messages)
    solution = str(task["ground_truth"])
    was_right, is_right = (_is_right(text, solution) for text in (draft, final))
    parts = {
        "right_at_first": float(was_right),
        "corrected": float(is_right and not was_right),
        "spoiled": float(was_right and not is_right),
    }
    return AgentReward(float(is_right), parts)


async def _ask(task: AgentTask, client: AsyncOpenAI, messages: list[Any]) -> str:
    answer = await client.chat.completions.create(model=task.model, messages=messages)
    return answer.choices[0].message.content or ""


def _is_right(text: str, solution: str) -> bool:
    """Compare the last boxed number with the one after `####` in a solution."""
    boxed = _BOXED.findall(text)
    right = _number(solution.rpartition("####")[2])
    return bool(boxed) and right is not None and _number(boxed[-1]) == right


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", "").strip())
    except ValueError:
        return None
