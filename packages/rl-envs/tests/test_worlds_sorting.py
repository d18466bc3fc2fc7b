from __future__ import annotations

import cProfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_distributed.errors import ConfigError
from rl_envs import (
    MessageLogError,
    SortingConfig,
    SortingEnvironment,
    SortingTasks,
    TaskError,
    check_environment,
    create_env,
)


def log_of(prompt: str, response: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": response},
    ]


def judge(environment: SortingEnvironment, *pairs: tuple[str, str]) -> list[float]:
    logs = [log_of("?", response) for response, _ in pairs]
    result = environment.step(logs, [{"answer": answer} for _, answer in pairs])
    assert isinstance(result.rewards, torch.Tensor)
    return result.rewards.tolist()


@given(
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from(["", " ", ","]),
    st.sampled_from(["=", " ->", ""]),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_answer_is_the_sorted_prompt(
    low: int, extra: int, separator: str, suffix: str, seed: int
) -> None:
    tasks = SortingTasks(
        min_digits=low,
        max_digits=low + extra,
        separator=separator,
        suffix=suffix,
        seed=seed,
    )
    for row in tasks.train(20, unique=False) + tasks.held_out(5, unique=False):
        body = row["prompt"].removesuffix(suffix) if suffix else row["prompt"]
        digits = body.split(separator) if separator else list(body)
        assert low <= len(digits) <= low + extra
        assert row["answer"] == separator.join(sorted(digits))
        assert set(row["prompt"]) <= set(tasks.alphabet)
        assert len(row["prompt"]) <= tasks.max_prompt_chars
        assert len(row["answer"]) <= tasks.max_answer_chars


def test_the_two_forms() -> None:
    [compact] = SortingTasks(num_digits=4).train(1)
    assert len(compact["prompt"]) == 5
    assert len(compact["answer"]) == 4
    [spaced] = SortingTasks(num_digits=4, separator=" ").train(1)
    assert len(spaced["answer"]) == 7
    assert spaced["answer"].replace(" ", "").isdigit()


def test_neither_prompts_nor_answers_are_shared_between_the_parts() -> None:
    train = SortingTasks(num_digits=5, seed=1).train(2000)
    held_out = SortingTasks(num_digits=5, seed=2).held_out(200)
    for column in ("prompt", "answer"):
        assert {row[column] for row in train}.isdisjoint(
            row[column] for row in held_out
        )


def test_wrong_settings_are_named() -> None:
    for settings_, message in (
        ({}, "give num_digits, or both"),
        ({"num_digits": 3, "max_digits": 4}, "got both"),
        ({"min_digits": 4, "max_digits": 3}, "1 <= min_digits <= max_digits"),
        ({"num_digits": 0}, "1 <= min_digits"),
        ({"num_digits": 3, "suffix": "1="}, "suffix must not hold a digit"),
    ):
        with pytest.raises(TaskError, match=message):
            SortingTasks(**settings_)  # type: ignore[arg-type]


def test_exact_credit() -> None:
    pairs = [("1238", "1238"), (" 1238\n", "1238"), ("1283", "1238"), ("", "1238")]
    assert judge(SortingEnvironment(), *pairs) == [1.0, 1.0, 0.0, 0.0]
    assert judge(SortingEnvironment(), ("12388", "1238"), ("1 2", "12")) == [0.0, 0.0]


@given(st.text("0123456789", max_size=8), st.text("0123456789", min_size=1, max_size=8))
def test_credit_for_positions_is_one_only_for_the_right_answer(
    response: str, answer: str
) -> None:
    environment = SortingEnvironment(SortingConfig(credit="positions"))
    [reward] = judge(environment, (response, answer))
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (response == answer)


def test_the_environment_keeps_its_contract() -> None:
    for credit in ("exact", "positions"):
        check_environment(create_env("sorting", {"credit": credit}))
    check_environment(
        SortingEnvironment(),
        [log_of("21=", "12"), log_of("21=", "21")],
        [{"answer": "12"}, {"answer": "12", "other": [1]}],
    )


def test_answers_observations_and_metrics() -> None:
    environment = SortingEnvironment()
    result = environment.step(
        [log_of("21=", "12 "), log_of("21=", "x")], [{"answer": "12"}] * 2
    )
    assert result.answers == ["12", "x"]
    assert [m["content"] for m in result.observations] == ["correct", "incorrect"]
    assert result.terminateds.tolist() == [True, True]
    batch: dict[str, Any] = {"rewards": result.rewards}
    assert environment.global_post_process_and_metrics(batch)[1]["accuracy"] == 0.5
    assert environment.global_post_process_and_metrics({}) == ({}, {})


def test_mistakes_are_named() -> None:
    with pytest.raises(MessageLogError, match=r"metadata\[0\] must have the column"):
        SortingEnvironment().step([log_of("1=", "1")], [{"solution": "1"}])
    with pytest.raises(MessageLogError, match="got 0 for 1"):
        SortingEnvironment().step([log_of("1=", "1")], [])
    with pytest.raises(ConfigError, match="credit"):
        create_env("sorting", {"credit": "some"})
    with pytest.raises(ConfigError, match="credits"):
        create_env("sorting", {"credits": "exact"})


def test_a_row_is_judged_in_few_calls() -> None:
    """Python calls are counted: their number is independent of the machine."""
    rows = SortingTasks(num_digits=10).train(512)
    logs = [log_of(row["prompt"], row["answer"]) for row in rows]
    environment = SortingEnvironment()
    profile = cProfile.Profile()
    profile.runcall(environment.step, logs, rows)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 20 * len(rows)
