"""Agents answered by a function: what they receive, what is refused, how runs end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest

from rl_envs import AgentEnvironment, conversation
from rl_envs.agents import stand_in
from rl_envs.agents.stand_in import (
    AgentQuestion,
    AgentReply,
    PlayedTask,
    UnansweredError,
    run_agents,
)
from rl_envs.agents.tasks import AgentLimits, AgentPoll
from rl_envs.errors import AgentError, AgentSetupError
from rl_envs.worlds.arithmetic import ArithmeticEnvironment

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}


async def echo(question: AgentQuestion) -> AgentReply:
    return AgentReply.of(str(question.messages[-1]["content"]).upper())


def ran(
    agent: Callable[..., Any], *prompts: str, answer: Any = echo, **settings: Any
) -> list[PlayedTask]:
    environment = AgentEnvironment(agent, **settings)
    tasks = [([{"role": "user", "content": p}], {"prompt": p}) for p in prompts]
    try:
        return run_agents(environment, tasks, answer)
    finally:
        environment.shutdown()


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_each_task_is_answered_and_recorded_by_itself() -> None:
    async def agent(task: Any, client: Any) -> float:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]
        first = await client.chat.completions.create(
            model="policy", messages=task.messages
        )
        critic = conversation(client, "critic")
        await critic.chat.completions.create(model="policy", messages=user("well?"))
        assert first.choices[0].finish_reason == "stop"
        return float(len(first.choices[0].message.content))

    played = ran(agent, "ab", "cde", max_at_once=1)
    assert [one.result.reward.reward for one in played if one.result.reward] == [2, 3]
    for index, one in enumerate(played):
        questions = [question for question, _ in one.exchanges]
        assert [q.conversation for q in questions] == ["main", "critic"]
        assert [(q.task, q.number) for q in questions] == [(index, 0), (index, 1)]
    assert played[1].exchanges[0][1].message["content"] == "CDE"
    assert ran(agent) == []


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_calls_and_cut_replies_arrive(is_streamed: bool) -> None:
    replies = [
        AgentReply({"role": "assistant", "content": None, "tool_calls": [CALL]}),
        AgentReply({"content": "lon"}, is_cut=True, num_tokens=3),
    ]

    async def answer(question: AgentQuestion) -> AgentReply:
        return replies[question.number]

    async def agent(task: Any, client: Any) -> float:
        found = []
        for _ in replies:
            asked = {"model": task.model, "messages": task.messages}
            if not is_streamed:
                whole = await client.chat.completions.create(**asked)
                [choice] = whole.choices
                calls = choice.message.tool_calls or []
                found.append((choice.message.content, choice.finish_reason))
                tokens = whole.usage.completion_tokens
            else:
                stream = await client.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}
                )
                first, last, usage = [event async for event in stream]
                calls = first.choices[0].delta.tool_calls or []
                content = first.choices[0].delta.content
                found.append((content, last.choices[0].finish_reason))
                tokens = usage.usage.completion_tokens
            if calls:
                assert calls[0].function.arguments == '{"a": 1}'
        assert found == [(None, "tool_calls"), ("lon", "length")]
        return float(tokens)

    [one] = ran(agent, "a", answer=answer)
    assert one.result.error == ""
    assert one.result.reward is not None
    assert one.result.reward.reward == 3.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "other"}, "model must be 'policy': got 'other'"),
        ({"n": 2}, "n must be 1 where no policy answers: got 2"),
        ({"messages": []}, "messages must be a list with at least one message"),
    ],
)
def test_wrong_requests(fields: dict[str, Any], message: str) -> None:
    async def agent(task: Any, client: Any) -> float:
        asked = {"model": task.model, "messages": task.messages, **fields}
        await client.chat.completions.create(**asked)
        return 1.0

    [one] = ran(agent, "a")
    assert (one.result.ending, one.result.reward, one.exchanges) == ("error", None, [])
    assert message in one.result.error


def test_a_key_of_no_task_and_too_many_requests() -> None:
    async def agent(task: Any, base_url: str, api_key: str) -> float:
        stranger = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        asked = {"model": task.model, "messages": task.messages}
        await client.chat.completions.create(**asked)
        await client.chat.completions.create(**asked)
        with pytest.raises(openai.BadRequestError, match=r"2 requests \(max_calls\)"):
            await client.chat.completions.create(**asked)
        return 1.0

    [one] = ran(agent, "a", max_calls=2)
    assert (one.result.error, len(one.exchanges)) == ("", 2)


def test_a_request_without_a_reply_and_one_that_ends_the_run() -> None:
    async def agent(task: Any, client: Any) -> float:
        asked = {"model": task.model, "messages": task.messages}
        await client.chat.completions.create(**asked)
        return 1.0

    async def some(question: AgentQuestion) -> AgentReply:
        if question.task == 0:
            raise UnansweredError("nobody is here")
        return await echo(question)

    first, second = ran(agent, "a", "b", answer=some)
    assert "nobody is here" in first.result.error
    assert second.result.ending == "done"

    waiting = asyncio.Event()

    async def fails(question: AgentQuestion) -> AgentReply:
        if question.task == 0:
            raise ValueError("no more")
        await waiting.wait()
        return await echo(question)

    # The other task, which would otherwise wait until its limit, is cancelled.
    with pytest.raises(ValueError, match="no more"):
        ran(agent, "a", "b", answer=fails, time_limit_s=20.0)


class Stuck:
    """Runs nothing and reports nothing."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    agent_limits = AgentLimits("policy", 8, 0.01, None, 1)
    num_agent_workers = 1

    def poll_agents(
        self, begin: Any, cancel: Sequence[int], wait_s: float, worker: int = 0
    ) -> AgentPoll:
        self.cancelled += cancel
        return AgentPoll([], "process")


def test_a_stuck_environment_and_one_without_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_in, "_GRACE_S", 0.1)
    stuck, tasks = Stuck(), [(user("a"), {}), (user("b"), {})]
    with pytest.raises(AgentError, match=r"2 of 2 tasks did not end within 0\.12 s"):
        run_agents(stuck, tasks, echo)
    assert stuck.cancelled == [0, 1]
    with pytest.raises(AgentSetupError, match="judges answers instead"):
        run_agents(ArithmeticEnvironment(), tasks, echo)  # type: ignore[arg-type]
