from __future__ import annotations

import asyncio
import json
import pickle
import threading
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st

from rl_envs import (
    GroupRewardWrapper,
    JsonToolCallParser,
    MessageLogError,
    Tool,
    ToolCall,
    ToolEnvironment,
    ToolError,
    ToolLimits,
    ToolUnavailableError,
    check_environment,
)
from rl_envs.interfaces import EnvironmentReturn, observation_messages
from rl_envs.tools.functions import ToolArgumentError
from rl_envs.tools.runs import Job, run_jobs


def search(query: str, limit: int = 3, unit: Literal["km", "mi"] = "km") -> list[str]:
    """Search the library.

    It is small.

    Args:
        query: Words to look for,
            all of them.
        limit: Most results.

    Returns:
        Titles.
    """
    return [f"{query}{i}{unit}" for i in range(limit)]


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


def owner(row: dict[str, Any]) -> str:
    """Tell whose turn it is."""
    return str(row["name"])


def down(query: str) -> str:
    """Ask a service that is gone."""
    raise ToolUnavailableError("no route to host")


async def nap(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def log_of(*responses: str) -> list[dict[str, str]]:
    log = [{"role": "user", "content": "?"}]
    for response in responses:
        log += [{"role": "assistant", "content": response}]
    return log


def said(result: EnvironmentReturn[Any], row: int = 0) -> list[str]:
    return [m["content"] for m in observation_messages(result.observations[row])]


def make(*tools: Any, **settings: Any) -> ToolEnvironment:
    judge = settings.pop("judge", lambda response, answer: response == answer)
    return ToolEnvironment(tools or [search, divide, owner], judge, **settings)


ROW = {"answer": "4", "name": "Ada"}


def test_a_schema_is_made_of_signature_and_docstring() -> None:
    assert Tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the library.\n\nIt is small.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "Words to look for, all of them.",
                    },
                    "limit": {
                        "type": "integer",
                        "default": 3,
                        "description": "Most results.",
                    },
                    "unit": {
                        "type": "string",
                        "default": "km",
                        "enum": ["km", "mi"],
                    },
                },
                "required": ["query"],
            },
        },
    }
    assert Tool(owner).schema["function"]["parameters"]["properties"] == {}
    renamed = pickle.loads(pickle.dumps(Tool(search, "find", "Find it.")))
    assert renamed.schema["function"]["name"] == "find"


@pytest.mark.parametrize(
    ("fn", "message"),
    [(3, "must be callable"), (lambda query: 0, "needs a name")],
)
def test_what_cannot_be_a_tool(fn: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        Tool(fn)


def test_what_cannot_be_described() -> None:
    def bare(query):  # type: ignore[no-untyped-def]
        """Search."""

    def many(*queries: str) -> None:
        """Search."""

    def silent(query: str) -> None:
        pass

    def odd(query: threading.Lock) -> None:  # type: ignore[valid-type]
        """Search."""

    for fn, message in (
        (bare, "'query' has no annotation"),
        (many, "use named parameters"),
        (silent, "no docstring"),
        (odd, "cannot be described"),
    ):
        with pytest.raises(ToolError, match=message):
            Tool(fn)
    with pytest.raises(ToolError, match=r"each name once: got \['search', 'search'\]"):
        make(search, search)
    with pytest.raises(ToolError, match="at least one"):
        ToolEnvironment([], lambda response: 1.0)


def test_arguments_are_checked_and_converted() -> None:
    assert Tool(search).bind({"query": "a", "limit": "2"}, {}) == {
        "query": "a",
        "limit": 2,
        "unit": "km",
    }
    assert Tool(owner).bind({}, ROW) == {"row": ROW}
    for arguments, message in (
        ({}, "argument query: Field required"),
        ({"query": "a", "limit": "x"}, "argument limit: .*integer"),
        ({"query": "a", "other": 1}, "argument other: .*not permitted"),
    ):
        with pytest.raises(ToolArgumentError, match=message):
            Tool(search).bind(arguments, {})
    with pytest.raises(ToolArgumentError, match="row"):
        Tool(owner).bind({"row": {"name": "Eve"}}, ROW)


def test_calls_are_found() -> None:
    parse = JsonToolCallParser()
    two = f"Let me see. {call('search', query='a')} and {call('divide', a=1, b=2)}"
    assert parse(two) == [
        ToolCall("search", {"query": "a"}),
        ToolCall("divide", {"a": 1, "b": 2}),
    ]
    assert parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}') == [
        ToolCall("f", {"a": 1})
    ]
    assert parse(f"<think>maybe {call('f')}</think>No.") == []
    for body, error in (
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"arguments": {}}', 'lacks "name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be'),
    ):
        [found] = parse(f"<tool_call>{body}</tool_call>")
        assert error in (found.error or "")
    assert JsonToolCallParser("[[", "]]")('[[{"name": "f"}]]') == [ToolCall("f", {})]


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    for found in JsonToolCallParser()(f"<tool_call>{text}</tool_call>{text}"):
        assert found.error is not None or found.name


def test_calls_go_on_and_answers_are_judged() -> None:
    logs = [
        log_of(call("divide", a=1, b=4) + call("owner")),
        log_of("4"),
        log_of("5"),
    ]
    environment = make()
    result = environment.step(logs, [ROW] * 3)
    assert said(result) == ["0.25", "Ada"]
    assert observation_messages(result.observations[0])[0]["role"] == "tool"
    assert result.terminateds.tolist() == [False, True, True]
    assert isinstance(result.rewards, torch.Tensor)
    assert result.rewards.tolist() == [0.0, 1.0, 0.0]
    assert result.metadata[0] == {
        **ROW,
        "num_prompt_messages": 1,
        "num_tool_turns": 1,
        "num_tool_calls": 2,
        "num_tool_errors": 0,
    }
    batch: dict[str, Any] = {"rewards": result.rewards, "metadata": result.metadata}
    metrics = environment.global_post_process_and_metrics(batch)[1]
    assert metrics["tool_calls_per_sample"] == pytest.approx(2 / 3)
    assert metrics["tool_error_rate"] == 0.0
    check_environment(make(), logs, [ROW] * 3)


def test_errors_are_told_to_the_policy() -> None:
    calls = [
        call("divide", a=1, b=0),
        call("divide", a=1),
        call("sing"),
        "<tool_call>{</tool_call>",
        call("search", query="x", limit=50),
        call("owner"),
    ]
    limits = ToolLimits(max_calls_per_turn=5, max_result_chars=20)
    result = make(limits=limits).step([log_of("".join(calls))], [ROW])
    texts = said(result)
    assert texts[0].startswith("Error: divide: Zero")
    assert texts[1].startswith("Error: divide: argument")
    assert texts[2] == (
        "Error: there is no tool 'sing'; the tools are: search, divide, owner"
    )
    assert "not valid JSON" in texts[3]
    assert texts[4] == '["x0km", "x1km", "x2... (cut)'
    assert texts[5] == "Error: only the first 5 calls of a turn are run"
    row = result.metadata[0]
    assert row is not None
    assert (row["num_tool_calls"], row["num_tool_errors"]) == (6, 5)
    assert result.terminateds.tolist() == [False]


def test_a_tool_that_ends_its_thread_is_an_error_at_once() -> None:
    def leave() -> None:
        raise SystemExit(3)

    def stop() -> None:
        raise asyncio.CancelledError

    jobs = [Job(leave, {}), Job(stop, {})]
    runs = run_jobs(jobs, deadline_s=60.0, max_concurrency=2)
    assert "SystemExit(3)" in str(runs[0].error)
    assert "CancelledError()" in str(runs[1].error)


def test_results_are_texts_that_every_tokenizer_takes() -> None:
    def echo(given: dict[str, str]) -> dict[str, str]:
        """Return it."""
        return given

    environment = ToolEnvironment([echo], lambda response: 1.0)
    call = '{"name": "echo", "arguments": {"given": {"a": "\\ud800"}}}'
    log = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
    ]
    [[said]] = environment.step([log], [{}]).observations
    assert said["content"] == '{"a": "?"}'


def test_the_number_of_turns_with_tools_is_bounded() -> None:
    environment = make(limits=ToolLimits(max_tool_turns=1))
    first = environment.step([log_of(call("owner"))], [ROW])
    again = environment.step(
        [log_of(call("owner"), call("owner"))], list(first.metadata)
    )
    assert again.terminateds.tolist() == [True]
    assert isinstance(again.rewards, torch.Tensor)
    assert again.rewards.tolist() == [0.0]


def test_a_tool_that_is_down_is_no_reward_of_zero() -> None:
    result = make(down, owner).step(
        [log_of(call("down", query="x")), log_of(call("owner"))], [ROW] * 2
    )
    assert isinstance(result.rewards, torch.Tensor)
    assert result.rewards.isnan().tolist() == [True, False]
    assert result.terminateds.tolist() == [True, False]


def test_several_rewards_are_zero_while_the_conversation_goes_on() -> None:
    def judge(response: str, num_tool_calls: int) -> dict[str, float | None]:
        return {"right": float(response == "4"), "calls": num_tool_calls, "x": None}

    result = make(judge=judge).step([log_of(call("owner")), log_of("4")], [ROW] * 2)
    assert isinstance(result.rewards, dict)
    assert result.rewards["reward/right"].tolist() == [0.0, 1.0]
    assert result.rewards["reward/calls"].tolist() == [0.0, 0.0]
    assert result.rewards["reward/x"].isnan().tolist() == [False, True]


def test_the_judge_may_see_groups_and_prompts() -> None:
    def shortest(prompts: list[str], responses: list[str]) -> list[float]:
        assert prompts == ["?"] * 2
        return [float(len(r) == min(map(len, responses))) for r in responses]

    environment = make(judge=GroupRewardWrapper(shortest))
    rows = [{"num_prompt_messages": 1}] * 2
    logs = [log_of(call("owner"), "a"), log_of("bcd")]
    scores = environment.score_groups([logs], [rows])
    assert scores is not None
    assert isinstance(scores[0], torch.Tensor)
    assert scores[0].tolist() == [1.0, 0.0]
    assert make().score_groups([logs], [rows]) is None


def test_metadata_must_be_columns() -> None:
    with pytest.raises(MessageLogError, match=r"metadata\[0\] must be a mapping"):
        make().step([log_of("4")], [3])  # type: ignore[list-item]
    with pytest.raises(MessageLogError, match="got 0 for 1"):
        make().step([log_of("4")], [])


def test_jobs_have_deadlines_and_keep_their_order() -> None:
    release = threading.Event()

    def hang() -> str:
        release.wait(300.0)
        return "late"

    jobs = [
        Job(lambda: "first", {}),
        Job(hang, {}),
        Job(nap, {"seconds": 300.0}),
        Job(divide, {"a": 1, "b": 0}),
        Job(nap, {"seconds": 0.0}),
    ]
    # Enough time for quick tools, even on a busy machine.
    runs = run_jobs(jobs, deadline_s=2.0, max_concurrency=2)
    release.set()
    assert runs[0].value == "first"
    for late in (runs[1], runs[2]):
        assert isinstance(late.error, TimeoutError)
        assert str(late.error) == "no result within 2 s"
    assert isinstance(runs[3].error, ZeroDivisionError)
    assert runs[4].value == "awake"
    assert run_jobs([], deadline_s=1.0, max_concurrency=1) == []


def test_results_are_in_the_order_of_calls_not_of_completion() -> None:
    ended = [threading.Event() for _ in range(4)]

    def turn(number: int) -> int:
        """End after the next call has ended."""
        if number + 1 < len(ended):
            assert ended[number + 1].wait(60.0)
        ended[number].set()
        return number

    async def later(number: int) -> int:
        """End after the next call has ended, without blocking a thread."""
        while number + 1 < len(ended) and not ended[number + 1].is_set():
            await asyncio.sleep(0)
        ended[number].set()
        return number

    jobs = [Job((turn, later)[n % 2], {"number": n}) for n in range(4)]
    runs = run_jobs(jobs, deadline_s=60.0, max_concurrency=4)
    assert [run.value for run in runs] == [0, 1, 2, 3]
