"""An agent: it asks the policy for a secret digit, and says more or less each time.

Train it from the shell (any model that answers with text will do):

    rl train grpo policy.model_name=MODEL data.train=digits.jsonl env.name=agent \
        env.settings.file=examples/guess_agent.py

or as a program, with the rows made here:

    python examples/guess_agent.py MODEL
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rl_envs import AgentTask

MOST_GUESSES = 3


async def agent(task: AgentTask, client: AsyncOpenAI) -> float:
    """Let the policy guess; return 1 for the right digit at once, less for later."""
    secret = int(task["answer"])
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for guesses in range(1, MOST_GUESSES + 1):
        answer = await client.chat.completions.create(
            model=task.model, messages=messages
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        if not text[:1].isdigit():
            return 0.0
        guess = int(text[0])
        if guess == secret:
            return 1.0 / guesses
        messages.append({"role": "user", "content": "+" if guess < secret else "-"})
    return 0.2  # digits at least


def rows(count: int) -> list[dict[str, str]]:
    """Return tasks, each with its secret digit."""
    return [{"prompt": "digit?", "answer": str(n % 10)} for n in range(count)]


def main(model: str, **settings: Any) -> Any:
    """Train a model on the task, with the agent in this process."""
    import rl_algorithms as rl  # noqa: PLC0415 - only workers of the shell's run need less
    from rl_envs import AgentEnvironment  # noqa: PLC0415

    return rl.train(model, rows(320), environment=AgentEnvironment(agent), **settings)


if __name__ == "__main__":
    main(sys.argv[1])
