"""The world `regex`: texts for expressions, expressions for texts, hostile ones."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs.errors import MessageLogError, SolutionError, TaskError
from rl_envs.registry import env_registry, task_registry
from rl_envs.testing import assert_passed, examine_environment, examine_tasks
from rl_envs.worlds.regex import RegexConfig, RegexEnvironment, RegexTasks

# Takes longer than the age of the universe on a text that does not match.
CATASTROPHE = "(a+)+b"
HOSTILE_TEXT = "a" * 60 + "!"
LIMIT_S = 2.0


@pytest.fixture(scope="module")
def environment() -> Iterator[RegexEnvironment]:
    made = RegexEnvironment(RegexConfig(timeout_s=LIMIT_S))
    yield made
    made.shutdown()


def judge(
    env: RegexEnvironment, responses: Sequence[str], rows: Sequence[dict[str, Any]]
) -> tuple[list[float], list[str]]:
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in responses
    ]
    found = env.step(logs, rows)
    said = [str(one["content"]) for one in found.observations]  # type: ignore[call-overload]
    return [float(reward) for reward in found.rewards], said


@given(st.integers(1, 12), st.integers(2, 9), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_gold_answers_match_and_prompts_do_not(
    num_parts: int, max_repeats: int, seed: int
) -> None:
    tasks = RegexTasks(num_parts, max_repeats=max_repeats, seed=seed)
    for row in tasks.train(4, unique=False):
        assert re.fullmatch(row["pattern"], row["answer"])
        assert not re.fullmatch(row["pattern"], row["pattern"])
        assert not re.fullmatch(row["pattern"], row["prompt"])
        assert not re.fullmatch(row["pattern"], "")
        assert set(row["prompt"] + row["answer"]) <= set(tasks.alphabet)


@pytest.mark.parametrize(
    "source", [{}, {"num_parts": 8, "style": "words"}], ids=["default", "words"]
)
def test_right_and_wrong_answers(source: dict[str, Any]) -> None:
    def make(seed: int) -> RegexTasks:
        return RegexTasks(**source, seed=seed)

    assert_passed(examine_tasks(make, 24))
    assert_passed(examine_environment("regex", make(0).train(24)))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("axxx", 1.0),
        (" bxxx\n", 1.0),
        ("I write <answer>axx</answer>, no: <answer>axxx</answer>", 1.0),
        ("axxxx", 0.0),
        ("caxxx", 0.0),
        ("axxx bxxx", 0.0),
        ("a\u200bxxx", 0.0),
        ("[ab]x{3}", 0.0),
        ("<answer></answer>axxx", 0.0),
        ("", 0.0),
    ],
)
def test_a_text_must_match_as_a_whole(
    environment: RegexEnvironment, response: str, reward: float
) -> None:
    assert judge(environment, [response], [{"pattern": "[ab]x{3}"}])[0] == [reward]


def test_a_search_finds_parts() -> None:
    env = RegexEnvironment(RegexConfig(mode="search"))
    rewards, _ = judge(env, ["say axxx!", "ax"], [{"pattern": "[ab]x{3}"}] * 2)
    env.shutdown()
    assert rewards == [1.0, 0.0]


def test_an_expression_must_match_all_and_reject_all(
    environment: RegexEnvironment,
) -> None:
    row = {"matches": ["cat", "cot"], "rejects": ["cut", "caat"]}
    responses = ["c[ao]t", "c.t", "cat", "c[ao", "(?:cat|cot)", "x" * 1001, ""]
    rewards, said = judge(environment, responses, [row] * len(responses))
    assert rewards == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert said[1] == "incorrect: it matches 'cut'"
    assert said[2] == "incorrect: it does not match 'cot'"
    assert "it is not a regular expression" in said[3]
    assert "at most 1000 characters: got 1001" in said[5]


def test_hostile_expressions_and_texts_cost_their_own_limit(
    environment: RegexEnvironment,
) -> None:
    easy = {"pattern": "[ab]x{3}"}
    rows: list[dict[str, Any]] = [
        easy,
        {"pattern": CATASTROPHE},
        easy,
        {"matches": ["b", HOSTILE_TEXT]},
        {"matches": ["b"]},
        easy,
    ]
    responses = ["axxx", HOSTILE_TEXT, "axx", CATASTROPHE, "b", "bxxx"]
    judge(environment, ["axxx"], [easy])  # a process is running
    begin = time.monotonic()
    logs = [[{"role": "assistant", "content": text}] for text in responses]
    found = environment.step(logs, rows)
    took_s = time.monotonic() - begin
    assert [float(reward) for reward in found.rewards] == [1, 0, 0, 0, 1, 1]
    verified = [row["verified"] for row in found.metadata]
    assert verified == [True, False, True, False, True, True]
    batch = {"rewards": found.rewards, "metadata": found.metadata}
    metrics = environment.global_post_process_and_metrics(batch)[1]
    assert metrics["unverified_fraction"] == pytest.approx(2 / 6)
    # Two limits, plus process starts on a busy machine.
    assert took_s < 2 * LIMIT_S + 20


def test_an_expression_that_is_hard_to_compile_costs_its_own_limit(
    environment: RegexEnvironment,
) -> None:
    nested = "(" * 300 + "a" + ")" * 300  # more than Python's stack holds
    rewards, _ = judge(environment, [nested, "b"], [{"matches": ["b"]}] * 2)
    assert rewards == [0.0, 1.0]


def test_rows_without_a_meaning_are_named(environment: RegexEnvironment) -> None:
    rows: list[Any] = [
        {"pattern": "a"},
        {"pattern": "a("},
        {"matches": []},
        {"matches": "ab"},
        None,
        {"matches": ["a"], "rejects": [1]},
        {"matches": ["a"], "rejects": None},
        {"pattern": 3},
    ]
    assert list(environment.unusable_rows(rows)) == [1, 2, 3, 4, 5, 7]
    with pytest.raises(SolutionError, match=r"1 of 2 rows.*\[1\].*not a regular"):
        judge(environment, ["a", "a"], rows[:2])
    with pytest.raises(MessageLogError, match="column 'pattern', a text, or 'matches'"):
        judge(environment, ["a"], [{}])


def test_wrong_settings_are_named() -> None:
    for wrong, message in (
        ({"num_parts": 0}, "num_parts must be 1 to 20"),
        ({"max_repeats": 10}, "max_repeats must be 2 to 9"),
        ({"style": "long"}, "'compact' or 'words'"),
    ):
        with pytest.raises(TaskError, match=message):
            RegexTasks(**wrong)


def test_it_is_registered() -> None:
    assert env_registry.get("regex") is RegexEnvironment
    assert task_registry.get("regex") is RegexTasks
