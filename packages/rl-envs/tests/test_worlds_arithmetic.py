"""The world `arithmetic`: tasks with exact values, and accepted answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs.errors import MessageLogError, TaskError
from rl_envs.registry import env_registry, task_registry
from rl_envs.testing import assert_passed, examine_environment, examine_tasks
from rl_envs.worlds.arithmetic import (
    ArithmeticConfig,
    ArithmeticEnvironment,
    ArithmeticTasks,
)
from rl_envs.worlds.countdown.expressions import read_expression


def judge(response: str, answer: Any = "46", **config: Any) -> tuple[float, str]:
    log = [
        {"role": "user", "content": "12+34="},
        {"role": "assistant", "content": response},
    ]
    env = ArithmeticEnvironment(ArithmeticConfig(**config))
    found = env.step([log], [{"answer": answer}])
    return float(found.rewards[0]), str(found.observations[0]["content"])


@given(
    num_operands=st.integers(2, 6),
    digits=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    operators=st.sampled_from(["+", "+-", "*", "+-*", "+-*/", "+/"]),
    brackets=st.booleans(),
    negative=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_every_gold_answer_is_the_value_of_its_expression(
    num_operands: int,
    digits: list[int],
    operators: str,
    brackets: bool,
    negative: bool,
    seed: int,
) -> None:
    low, high = digits
    tasks = ArithmeticTasks(
        num_operands,
        min_digits=low,
        max_digits=high,
        operators=operators,
        brackets=brackets,
        negative=negative,
        seed=seed,
    )
    for row in tasks.train(4, unique=False):
        # A different parser than the generator's own: the one of countdown.
        value, used = read_expression(row["expression"])
        assert str(value) == row["answer"]
        assert sum(used.values()) == num_operands
        assert all(low <= len(str(number)) <= high for number in used)
        assert set(row["expression"]) - set("0123456789()") <= set(operators)
        assert negative or value >= 0
        assert brackets or "(" not in row["expression"]
        assert set(row["prompt"] + row["answer"]) <= set(tasks.alphabet)
        assert judge(row["answer"], row["answer"])[0] == 1.0


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"num_operands": 4, "operators": "+-*/", "brackets": True, "negative": True},
        {"num_operands": 3, "max_digits": 5, "operators": "*/", "style": "words"},
    ],
    ids=["default", "all", "words"],
)
def test_right_and_wrong_answers(source: dict[str, Any]) -> None:
    def make(seed: int) -> ArithmeticTasks:
        return ArithmeticTasks(**source, seed=seed)

    assert_passed(examine_tasks(make, 24))
    assert_passed(examine_environment("arithmetic", make(0).train(24)))


def test_divisions_are_not_all_trivial() -> None:
    rows = ArithmeticTasks(operators="/", min_digits=2).train(100)
    assert len({row["answer"] for row in rows}) >= 5
    trees = ArithmeticTasks(4, operators="+-*/", brackets=True).train(100)
    assert sum("/" in row["expression"] for row in trees) > 10
    assert sum("(" in row["expression"] for row in trees) > 10
    assert any("-" in row["answer"] for row in ArithmeticTasks(negative=True).train(40))


def test_the_parts_share_no_task_in_whatever_order() -> None:
    def keys(rows: list[dict[str, Any]]) -> set[tuple[str, ...]]:
        return {(*sorted(row["expression"].split("+")), row["answer"]) for row in rows}

    train = ArithmeticTasks(operators="+", seed=1).train(600)
    held_out = ArithmeticTasks(operators="+", seed=2).held_out(60)
    assert keys(train).isdisjoint(keys(held_out))


def test_parts_do_not_depend_on_the_style() -> None:
    plain = ArithmeticTasks(seed=3).train(20)
    words = ArithmeticTasks(seed=3, style="words").train(20)
    pairs = zip(plain, words, strict=True)
    assert all(a["expression"] == b["expression"] for a, b in pairs)


@pytest.mark.parametrize(
    "response",
    [
        "46",
        " 46\n",
        "12+34=46",
        "0046",
        "+46",
        "I add 12 and 34.\n46",
        "<answer>45</answer>, no: <answer>46</answer>",
        "<answer>46",
        "<answer>12+34 = 46</answer> done",
    ],
)
def test_right_answers(response: str) -> None:
    assert judge(response) == (1.0, "correct")


@pytest.mark.parametrize(
    "response",
    [
        "",
        "=",
        "12+34=",
        "47",
        "-46",
        "46.0",
        "4 6",
        "46 47",
        "46\nor 47",
        "the answer is 46",
        "4,6",
        "\u0664\u0666",
        "46" * 5000,
        "<answer></answer>46",
        "46 <answer>47</answer>",
    ],
)
def test_wrong_answers_earn_nothing(response: str) -> None:
    assert judge(response)[0] == 0.0


def test_signs_thousands_and_huge_numbers_are_exact() -> None:
    assert judge("1,234,567", 1234567)[0] == 1.0
    assert judge("12,34,567", 1234567)[0] == 0.0
    assert judge("\u22125", "-5")[0] == 1.0
    assert judge("5", "-5")[0] == 0.0
    assert judge("-0", 0)[0] == 1.0
    big = 10**60
    assert judge(str(big), big)[0] == 1.0
    # Floats cannot distinguish these.
    assert judge(str(big + 1), big)[0] == 0.0


def test_graded_credit() -> None:
    assert judge("45", credit="graded")[0] == pytest.approx(0.1)
    assert judge("forty", credit="graded")[0] == 0.0
    assert judge("46", credit="graded")[0] == 1.0
    assert judge("45") == (0.0, "incorrect: it is not 46")


def test_wrong_settings_and_rows_are_named() -> None:
    for wrong, message in (
        ({"num_operands": 1}, "num_operands must be 2 to 12"),
        ({"min_digits": 3}, "in order: got 3 and 2"),
        ({"max_digits": 13}, "1 to 12"),
        ({"operators": "+^"}, "must be some of"),
        ({"style": "long"}, "'compact' or 'words'"),
    ):
        with pytest.raises(TaskError, match=message):
            ArithmeticTasks(**wrong)
    impossible = ArithmeticTasks(12, min_digits=12, max_digits=12, operators="/")
    with pytest.raises(TaskError, match="use fewer operands"):
        impossible.train(1)
    with pytest.raises(MessageLogError, match=r"'answer', a whole number: got '4\.5'"):
        judge("4", "4.5")
    rows = [{"answer": "7"}, {"answer": True}, {"answer": ""}, {}, {"answer": 7}]
    assert list(ArithmeticEnvironment().unusable_rows(rows)) == [1, 2, 3]


def test_accuracy_is_a_metric() -> None:
    env = ArithmeticEnvironment()
    rows = ArithmeticTasks().train(4)
    logs = [
        [{"role": "assistant", "content": text}]
        for text in (rows[0]["answer"], rows[1]["answer"], rows[2]["answer"], "x")
    ]
    found = env.step(logs, rows)
    batch = {"rewards": found.rewards, "metadata": found.metadata}
    assert env.global_post_process_and_metrics(batch)[1]["accuracy"] == 0.75


def test_it_is_registered() -> None:
    assert env_registry.get("arithmetic") is ArithmeticEnvironment
    assert task_registry.get("arithmetic") is ArithmeticTasks
