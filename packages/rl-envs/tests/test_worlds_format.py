"""The world `format`: sections in order, each once, and nothing outside them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError, TaskError
from rl_envs.interfaces import total_reward
from rl_envs.registry import env_registry, task_registry
from rl_envs.testing import assert_passed, examine_environment, examine_tasks
from rl_envs.worlds.format import FormatConfig, FormatEnvironment, FormatTasks

ROW = {"sections": ["think", "answer"]}


def said_of(observation: Any) -> str:
    return str(observation["content"])


def judge(response: str, row: Any = ROW, **config: Any) -> tuple[float, str]:
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}]
    found = FormatEnvironment(FormatConfig(**config)).step([log], [row])
    return float(total_reward(found.rewards)[0]), said_of(found.observations[0])


@given(
    num_sections=st.integers(1, 10),
    num_words=st.integers(1, 5),
    style=st.sampled_from(["tags", "headings"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_every_gold_answer_is_right(
    num_sections: int, num_words: int, style: Any, seed: int
) -> None:
    tasks = FormatTasks(num_sections, num_words=num_words, style=style, seed=seed)
    for row in tasks.train(3, unique=False):
        assert judge(row["answer"], row, style=style) == (1.0, "correct")
        assert len(row["sections"]) == num_sections
        if num_sections > 1:
            mixed = "\n".join(reversed(row["answer"].splitlines()))
            assert judge(mixed, row, style=style)[0] == 0.0


def test_right_and_wrong_answers() -> None:
    def make(seed: int) -> FormatTasks:
        return FormatTasks(4, seed=seed)

    assert_passed(examine_tasks(make, 24))
    assert_passed(examine_environment("format", make(0).train(24)))


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think><answer>b</answer>",
        "\n<think>\na < b\n</think>\n\n<answer> b </answer>\n",
        "<think><b>x</b></think><answer>b</answer>",
    ],
)
def test_right_formats(response: str) -> None:
    assert judge(response) == (1.0, "correct")


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("", "'think' must occur once: found 0"),
        ("<answer>b</answer><think>a</think>", "must come after those before it"),
        ("<think>a</think>", "'answer' must occur once: found 0"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "found 2"),
        ("<think>a</think><answer>b", "'answer' is empty"),
        ("<think>a<answer>b</answer></think>", "'think' must occur once: found 2"),
        ("<think>a</think><answer>b</answer></answer>", "found 2"),
        ("<think><think>a</think><answer>b</answer>", "found 2"),
        ("<think>a</think>b<answer>b</answer>", "text outside"),
        ("<think>a</think><answer>b</answer> so", "text outside"),
        ("<!-- <x> --><think>a</think><answer>b</answer>", "text outside"),
        ("<think>a</think>\u200b<answer>b</answer>", "text outside"),
        ("<think>a</think><answer>\u200b</answer>", "'answer' is empty"),
        ("<think> </think><answer>b</answer>", "'think' is empty"),
        ("<THINK>a</THINK><answer>b</answer>", "'think' must occur once: found 0"),
    ],
)
def test_wrong_formats(response: str, said: str) -> None:
    score, reason = judge(response)
    assert score == 0.0
    assert said in reason


def test_what_is_allowed_by_the_settings() -> None:
    talk = "So: <think>a</think> and <answer></answer>."
    assert judge(talk)[0] == 0.0
    assert judge(talk, allow_outside=True)[0] == 0.0
    assert judge(talk, allow_outside=True, allow_empty=True)[0] == 1.0
    text = "<think>a</think><answer>b</answer>"
    assert judge(text, {}, sections=("think", "answer"))[0] == 1.0
    headings = "# think\na\n# answer\nb # think\n"
    assert judge(headings, style="headings")[0] == 1.0
    assert judge(headings + "# think\n", style="headings")[0] == 0.0
    assert judge("Well.\n" + headings, style="headings")[0] == 0.0


def test_graded_credit_is_below_the_full_reward() -> None:
    def graded(response: str) -> float:
        return judge(response, credit="graded")[0]

    assert graded("<think>a</think><answer>b</answer>") == 1.0
    assert graded("<think>a</think><answer>b</answer>!") == pytest.approx(0.9)
    assert graded("<think>a</think>") == pytest.approx(0.45)
    assert graded("a") == 0.0
    # More of the same earns less, not more.
    assert graded("<think>a</think>" * 3 + "<answer>b</answer>") == pytest.approx(0.45)


def test_contents_are_compared() -> None:
    row = {"sections": ["a", "b"], "contents": {"a": "one two", "c": None}}
    assert judge("<a> one two\n</a><b>x</b>", row)[0] == 1.0
    assert judge("<a>one  two</a><b>x</b>", row)[0] == 0.0
    assert judge("<a>one two\u200b</a><b>x</b>", row)[0] == 0.0


def test_long_hostile_responses_take_no_time() -> None:
    for response in ("<think>" * 100_000, "<think></think>" * 50_000, "<" * 500_000):
        assert judge(response)[0] == 0.0


def test_wrong_settings_and_rows_are_named() -> None:
    for wrong, message in (
        ({"num_sections": 11}, "num_sections must be 1 to 10"),
        ({"num_words": 0}, "num_words must be 1 to 12"),
        ({"style": "long"}, "'tags' or 'headings'"),
    ):
        with pytest.raises(TaskError, match=message):
            FormatTasks(**wrong)
    with pytest.raises(ConfigError, match="each name once"):
        FormatEnvironment(FormatConfig(sections=("a", "a")))
    rows: list[Any] = [
        ROW,
        {},
        {"sections": []},
        {"sections": "think"},
        {"sections": ["a b"]},
        {"sections": ["a"], "contents": {"b": "x"}},
        {"sections": ["a"], "contents": {"a": 1}},
        None,
    ]
    assert list(FormatEnvironment().unusable_rows(rows)) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(MessageLogError, match=r"metadata\[0\]\['sections'\] must be"):
        judge("", {})


def test_it_is_registered() -> None:
    assert env_registry.get("format") is FormatEnvironment
    assert task_registry.get("format") is FormatTasks
