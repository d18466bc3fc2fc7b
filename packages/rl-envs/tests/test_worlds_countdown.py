"""The world `countdown`: solvable tasks, and accepted answers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs.errors import MessageLogError, TaskError
from rl_envs.registry import env_registry
from rl_envs.testing import check_environment
from rl_envs.worlds.countdown import (
    CountdownConfig,
    CountdownEnvironment,
    CountdownTasks,
)
from rl_envs.worlds.countdown.expressions import ExpressionError, read_expression

TASK = {"numbers": [3, 5, 2, 2], "target": 13}


def judge(
    response: str, task: dict[str, Any] = TASK, **config: Any
) -> tuple[float, str]:
    log = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": response},
    ]
    found = CountdownEnvironment(CountdownConfig(**config)).step([log], [task])
    return float(found.rewards[0]), str(found.observations[0]["content"])


@given(
    st.integers(2, 6),
    st.integers(1, 30),
    st.sampled_from(["+", "+-", "+*", "+-*/"]),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_gold_answer_is_right(
    num_numbers: int, max_number: int, operators: str, seed: int
) -> None:
    tasks = CountdownTasks(
        num_numbers,
        max_number=max_number,
        max_target=max_number * 20,
        operators=operators,
        seed=seed,
    )
    rows = tasks.train(8, unique=False)
    for row in rows:
        value, used = read_expression(row["answer"])
        assert value == row["target"]
        assert used == Counter(row["numbers"])
        assert len(row["numbers"]) == num_numbers
        assert 1 <= row["target"] <= max_number * 20
        assert judge(row["answer"], row)[0] == 1.0
        assert set(row["prompt"] + row["answer"]) <= set(tasks.alphabet)
    assert rows == CountdownTasks(
        **{
            "num_numbers": num_numbers,
            "max_number": max_number,
            "max_target": max_number * 20,
            "operators": operators,
            "seed": seed,
        }
    ).train(8, unique=False)


def test_the_parts_share_no_task_in_whatever_order() -> None:
    train = CountdownTasks(seed=1).train(800)
    held_out = CountdownTasks(seed=2).held_out(80)

    def keys(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
        return {(*sorted(row["numbers"]), row["target"]) for row in rows}

    assert keys(train).isdisjoint(keys(held_out))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3+5*2/2+2", 0.0),  # one number too often
        ("(3+5)*2-2", 0.0),  # 14
        ("3 + 5 * 2", 0.0),  # a number is left over
        ("5*2+(3*2-3)", 0.0),
        ("(3*2-2)+5", 0.0),
        ("3*5-2/2", 0.0),  # 14
        ("3*5-(2/2)-1", 0.0),
        ("3*(5-2)+2*2", 0.0),
        ("5+2*(2+3)-2", 0.0),
        ("3*5-2*2/2", 0.0),
        ("2*5+(3*2)/2", 0.0),
        ("5*3-(2+2)/2", 0.0),
        ("13", 0.0),
        ("", 0.0),
        ("2**3+5", 0.0),
        ("__import__('os')", 0.0),
        ("3/(5-5)", 0.0),
        ("(" * 300, 0.0),
    ],
)
def test_wrong_answers_earn_nothing(response: str, reward: float) -> None:
    assert judge(response)[0] == reward


def test_any_right_expression_is_right() -> None:
    task = {"numbers": [3, 5, 2], "target": 13}
    for text in ("3+5*2", "2*5+3", "(2 * 5) + 3", "3 + 5\u00d72", "3+5*2 = 13"):
        assert judge(text, task)[0] == 1.0
    # The solution may involve fractions: 8 / (3 - 8 / 3).
    hard = {"numbers": [3, 3, 8, 8], "target": 24}
    assert judge("8/(3-8/3)", hard)[0] == 1.0


def test_the_answer_is_what_is_tagged_or_the_last_line() -> None:
    task = {"numbers": [3, 5, 2], "target": 13}
    assert judge("I try <answer>1+1</answer>, no: <answer>3+5*2</answer>", task)[0] == 1
    assert judge("5*2 is 10\n3+5*2\n", task)[0] == 1.0
    assert judge("3+5*2\nor not", task)[0] == 0.0


def test_credit_and_numbers_that_may_stay() -> None:
    assert judge("3+5+2+2", credit="graded")[0] == pytest.approx(0.1)
    assert judge("3+5+2+2") == (0.0, "incorrect: it is 12, not 13")
    assert judge("3+5*2", use_all=False)[0] == 1.0
    assert judge("3+5*2+2-2", use_all=False)[1] == "incorrect: the numbers are 2 2 3 5"


def test_values_are_exact() -> None:
    assert read_expression("1/3+1/3+1/3")[0] == Fraction(1)
    with pytest.raises(ExpressionError, match="divides by zero"):
        read_expression("1/(2-2)")
    with pytest.raises(ExpressionError, match="whole numbers"):
        read_expression("-1+2")


def test_wrong_settings_and_rows_are_named() -> None:
    for wrong, message in (
        ({"num_numbers": 1}, "must be 2 to 6"),
        ({"max_number": 0}, "at least 1"),
        ({"operators": "+^"}, "must be some of"),
        ({"style": "long"}, "'compact' or 'words'"),
    ):
        with pytest.raises(TaskError, match=message):
            CountdownTasks(**wrong)
    with pytest.raises(TaskError, match="raise max_target"):
        CountdownTasks(6, max_number=9, max_target=1, operators="+").train(1)
    with pytest.raises(MessageLogError, match="'numbers', a list of whole numbers"):
        judge("1", {"numbers": "3 5", "target": 8})
    found = CountdownEnvironment().unusable_rows([TASK, {"numbers": [1]}])
    assert list(found) == [1]


def test_it_fulfils_the_contract() -> None:
    assert env_registry.get("countdown") is CountdownEnvironment
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in ("3+5*2", "1", "")
    ]
    check_environment(CountdownEnvironment(), logs, [TASK] * 3)
