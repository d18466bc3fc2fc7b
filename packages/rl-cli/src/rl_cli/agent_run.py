"""Measuring a model on a server with the tasks of an environment that runs agents.

```
tasks x samples -> agents --ask--> listener here --ask--> the server
                     |                                        |
                     +--rewards          <------ replies -----+
```
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_algorithms.evaluation import DatasetEvaluation, EvalConfig
from rl_cli.chat_server import ChatServer
from rl_cli.environment_choice import GivenTasks
from rl_cli.environment_run import (
    MeasuredConversation,
    begin_conversations,
    evaluation_of,
)
from rl_envs.agents.stand_in import (
    AgentQuestion,
    AgentReply,
    PlayedTask,
    UnansweredError,
    run_agents,
)
from rl_envs.agents.tasks import MAIN, AgentHost
from rl_models.errors import GenerationError

__all__ = ["measure_agents"]


def measure_agents(
    server: ChatServer, env: AgentHost, tasks: GivenTasks, config: EvalConfig
) -> DatasetEvaluation:
    """Have a server answer agents, and collect what their tasks earn.

    Args:
        server: The server.
        env: The environment.
        tasks: Tasks.
        config: Settings, as for `measure_address`; the agent decides how many turns
            there are.

    Returns:
        As `measure_address` does; a task whose agent raised or met a limit is not
        scored. Parts of rewards are the metrics `reward/<name>`.

    Raises:
        ConfigError: The server refuses a request.
        GenerationError: No request got a reply.
    """
    rounds = begin_conversations(tasks, config)
    room = asyncio.Semaphore(server.max_requests)
    problems: list[str] = []

    async def answer(question: AgentQuestion) -> AgentReply:
        async with room:
            seed = rounds[question.task].seed
            reply = await server.complete(question.fields, seed)
        if reply.text is None:
            problems.append(reply.problem)
            raise UnansweredError(f"The server gives no reply: {reply.problem}.")
        return AgentReply(
            reply.message, reply.is_truncated, reply.num_tokens, reply.time_s
        )

    played = run_agents(env, [(each.log, each.columns) for each in rounds], answer)
    if problems and not any(one.exchanges for one in played):
        raise GenerationError(
            f"{server.address} answered none of {len(problems)} requests, each tried "
            f"{server.num_attempts} times ({problems[0]}); start the server, correct "
            "--address, or raise --deadline-s"
        )
    for each, one in zip(rounds, played, strict=True):
        _take(each, one)
    return evaluation_of(rounds, config, _parts(played))


def _take(each: MeasuredConversation, one: PlayedTask) -> None:
    """Take over what a task has earned and said."""
    each.is_open = False
    if one.result.reward is None:
        each.reward, each.problem = math.nan, one.result.error or one.result.ending
    else:
        each.reward = one.result.reward.reward
    for _, reply in one.exchanges:
        each.num_chars += len(str(reply.message.get("content") or ""))
        each.num_tokens += reply.num_tokens or 0
        each.counts_tokens &= reply.num_tokens is not None
        each.time_s += reply.time_s
    # The conversation of the task itself, rather than that of a sub-agent.
    main = [pair for pair in one.exchanges if pair[0].conversation == MAIN]
    if last := (main or one.exchanges)[-1:]:
        [(question, reply)] = last
        said = {"role": "assistant", **reply.message}
        each.log = [_readable(message) for message in (*question.messages, said)]
        each.num_prompt_messages = next(
            place for place, m in enumerate(each.log) if m["role"] == "assistant"
        )
        each.is_truncated = reply.is_cut


def _parts(played: Sequence[PlayedTask]) -> dict[str, float]:
    """Return the mean of each part of the rewards."""
    values: dict[str, list[float]] = {}
    rewards = [one.result.reward for one in played if one.result.reward is not None]
    for reward in rewards:
        for name, value in reward.parts.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        content = "\n".join(map(str, parts))
    return {**message, "role": str(message.get("role")), "content": content or ""}
