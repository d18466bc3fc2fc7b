from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rl_envs import (
    FormatReward,
    FunctionalRewardWrapper,
    LengthPenalty,
    NumericMatch,
    RewardError,
    check_environment,
    check_reward_fn,
    combine_reward_functions,
    exact_match,
    numeric_match,
)
from rl_envs.rewards.functions import extract_number


def test_exact_match() -> None:
    assert exact_match(" 12\n", "12") == 1.0
    assert exact_match("1 2", "12") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("first 1, then 1,234.5", "1234.5"),
        ("-3", "-3"),
        ("3e2", "300"),
        ("about .5", "0.5"),
        ("3/4", "0.75"),
        ("\\boxed{17}", "17"),
        ("none", None),
        ("1/0", None),
    ],
)
def test_extract_number(text: str, number: str | None) -> None:
    assert extract_number(text) == (None if number is None else Decimal(number))


@given(st.text())
def test_no_text_breaks_the_extraction(text: str) -> None:
    extract_number(text)
    extract_number("1e999" + text)


@given(st.integers(-(10**9), 10**9), st.text("abc ", max_size=5))
def test_numeric_match_ignores_the_words_around(number: int, words: str) -> None:
    assert numeric_match(f"{words}{number}", number) == 1.0
    assert numeric_match(f"{words}{number + 1}", number) == 0.0


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("72", 72),
        ("-1,234.5", -1234.5),
        ("3/4", 0.75),
        ("1e-3", 0.001),
        ("$5", 5),
        ("12 apples", 12),
        ("50%", 50),
        ("\\boxed{17}", 17),
        ("She sold 48/2 = 24 in May.\n#### 72", 72),
    ],
)
def test_the_number_that_an_answer_is(answer: str, number: float) -> None:
    assert numeric_match(f"It is {number}", answer) == 1.0
    assert numeric_match(f"It is {number + 1}", answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "x**2 + 1",
        "Eq(x**2/4 + y**2/3, 1)",
        "1, 2",
        "3x",
        "x - 1",
        "[0, 1)",
        "2^3",
        "48/2 = 24, so 72",
        "\\frac{1}{2}",
        "\\sqrt{2}",
        "x = 5",
        "four",
        "1/0",
    ],
)
def test_a_formula_is_no_number(answer: str) -> None:
    assert numeric_match("1", answer) is None


def test_numeric_match() -> None:
    assert numeric_match("no idea", "4") == 0.0
    assert numeric_match("4", "four") is None
    assert NumericMatch(tolerance=0.01)("3.14", "3.1416") == 1.0
    assert NumericMatch(tolerance=0.0001)("3.14", "3.1416") == 0.0
    # Below 1 the tolerance is absolute, above it relative.
    assert NumericMatch(tolerance=0.01)("0.009", "0.001") == 1.0
    assert NumericMatch(tolerance=0.01)("0.02", "0.001") == 0.0
    assert NumericMatch(tolerance=0.01)("1009", "1000") == 1.0
    assert numeric_match("1" * 10_000, "1") in (0.0, 1.0)


def test_format() -> None:
    reward = FormatReward(r"<think>.*</think>\s*\d+")
    assert reward("<think>a\nb</think> 12") == 1.0
    assert reward("12") == 0.0
    assert reward("well <think>a</think> 12") == 0.0
    assert reward("<think>a</think> 12 or 13") == 0.0
    with pytest.raises(RewardError, match="not a regular expression"):
        FormatReward("(")


@given(st.integers(0, 60))
def test_the_length_penalty_falls_from_0_to_minus_1(length: int) -> None:
    reward = LengthPenalty(free_chars=10, max_chars=50)("x" * length)
    assert -1.0 <= reward <= 0.0
    assert (reward == 0.0) == (length <= 10)
    assert (reward == -1.0) == (length >= 50)


def test_wrong_lengths_are_named() -> None:
    with pytest.raises(RewardError, match="free_chars < max_chars"):
        LengthPenalty(5, 5)


async def later(response: str) -> float:
    return 1.0


def test_functions_of_all_kinds_combine() -> None:
    combined = combine_reward_functions(
        [
            (exact_match, 2.0),
            (lambda prompts, responses: [0.5 for _ in responses], 1.0),
            (later, 1.0),
            (lambda messages: float(len(messages) == 2), 1.0),
        ]
    )
    wrapper = FunctionalRewardWrapper(combined)
    assert wrapper.name.startswith("exact_match+<lambda>+later")
    assert combined(["q", "q"], ["a", "b"], answer=["a", "a"]) == pytest.approx(
        [(2 + 0.5 + 1 + 1) / 5, 2.5 / 5]
    )
    check_environment(wrapper)
    assert check_reward_fn(combined, {"prompt": "q", "answer": "a"}) == pytest.approx(
        0.9
    )


def test_weights_are_shared_among_the_functions_that_scored() -> None:
    def sometimes(response: str) -> float | None:
        return None if response == "?" else 0.0

    combined = combine_reward_functions({sometimes: 3.0, exact_match: 1.0})
    assert combined(["q"] * 2, ["?", "a"], answer=["?", "a"]) == [1.0, 0.25]
    alone = combine_reward_functions({sometimes: 1.0})
    assert alone(["q"], ["?"]) == [None]


def test_wrong_combinations_are_named() -> None:
    with pytest.raises(RewardError, match="at least one function"):
        combine_reward_functions([])
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(RewardError, match="'exact_match' must be positive"):
            combine_reward_functions([(exact_match, weight)])
    combined = combine_reward_functions({lambda response: {"a": 1.0}: 1.0})
    with pytest.raises(RewardError, match=r"several rewards \['a'\]"):
        combined(["q"], ["r"])


def test_they_can_be_pickled() -> None:
    things: list[Any] = [NumericMatch(0.1), FormatReward("a"), LengthPenalty(1, 2)]
    for thing in things:
        assert pickle.loads(pickle.dumps(thing)) == thing
    combined = combine_reward_functions({exact_match: 1.0})
    copy = pickle.loads(pickle.dumps(combined))
    assert copy(["q"], ["a"], answer=["a"]) == [1.0]
