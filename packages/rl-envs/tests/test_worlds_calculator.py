from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rl_distributed.errors import ConfigError
from rl_envs import (
    CalculatorConfig,
    CalculatorEnvironment,
    CalculatorTasks,
    TaskError,
    check_environment,
    create_env,
)
from rl_envs.interfaces import observation_messages
from rl_envs.registry import create_task_source
from rl_envs.worlds.calculator import BracketCallParser, calculate


def log_of(prompt: str, *responses: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": prompt},
        *({"role": "assistant", "content": text} for text in responses),
    ]


@given(st.integers(1, 5), st.integers(1, 99), st.integers(0, 99))
def test_answers_are_what_python_computes(terms: int, most: int, seed: int) -> None:
    source = CalculatorTasks(terms, max_number=most, seed=seed)
    for row in source.train(3, unique=False):
        assert row["answer"] == str(eval(row["prompt"].removesuffix("=")))
        assert set(row["prompt"] + row["answer"]) <= set(source.alphabet)
    assert source.train(3, unique=False) == source.train(3, unique=False)


def test_parts_do_not_overlap() -> None:
    source = create_task_source("calculator", {"num_terms": 3})
    prompts = [
        {row["prompt"] for row in part(200)} for part in (source.train, source.held_out)
    ]
    assert prompts[0].isdisjoint(prompts[1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14),
        (" -(2-5) ", 3),
        ("007*1", None),
        ("2**9", None),
        ("__import__('os')", None),
        ("1" * 101, None),
        ("", None),
        ("True", None),
        ("1/2", None),
    ],
)
def test_only_expressions_are_computed(text: str, value: int | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match=r"expression|computed"):
            calculate(text)
    else:
        assert calculate(text) == value


def test_a_conversation_in_both_formats() -> None:
    json_call = (
        '<tool_call>{"name": "calculate", "arguments": {"expression": "2+3"}}'
        "</tool_call>"
    )
    for call_format, text in (("json", json_call), ("brackets", "[2+3]")):
        environment = create_env("calculator", {"call_format": call_format})
        first = environment.step([log_of("2+3=", text)], [{"answer": "5"}])
        [message] = observation_messages(first.observations[0])
        assert message == {"role": "tool", "content": "5"}
        assert (first.terminateds.tolist(), first.answers) == ([False], [None])
        last = environment.step([log_of("2+3=", text, " 5")], list(first.metadata))
        assert last.terminateds.tolist() == [True]
        assert float(last.rewards[0]) == 1.0
        assert last.answers == ["5"]
    [tool] = environment.tool_schemas()
    assert tool["function"]["parameters"]["required"] == ["expression"]


def test_open_brackets_are_malformed_calls() -> None:
    good, bad = BracketCallParser()("[1+1] and [2")
    assert good.arguments == {"expression": "1+1"}
    assert bad.error == "a bracket was not closed"
    environment = CalculatorEnvironment(CalculatorConfig(call_format="brackets"))
    result = environment.step([log_of("1=", "[")], [{"answer": "1"}])
    [message] = observation_messages(result.observations[0])
    assert message["content"] == "Error: a bracket was not closed"


def test_the_environment_keeps_its_contract() -> None:
    check_environment(
        CalculatorEnvironment(CalculatorConfig(call_format="brackets", max_calls=2)),
        [log_of("1+1=", "2"), log_of("1+1=", "[1+1]"), log_of("1+1=", "[1+")],
        [{"answer": "2"}] * 3,
    )


def test_wrong_settings_are_named() -> None:
    with pytest.raises(TaskError, match="at least 1: got 0 and 9"):
        CalculatorTasks(0)
    with pytest.raises(TaskError, match="must be some of"):
        CalculatorTasks(operators="/")
    with pytest.raises(ConfigError, match="call_format"):
        create_env("calculator", {"call_format": "xml"})
