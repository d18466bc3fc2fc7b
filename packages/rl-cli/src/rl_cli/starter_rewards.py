"""Reward functions written by `rl init`, with their tests, as texts by file name."""

from __future__ import annotations

__all__ = ["reward_files"]


def reward_files(column: str | None) -> dict[str, str]:
    """Return a reward function and its tests.

    Args:
        column: Column of the final answer; None: there is none.
    """
    if column is None:
        return {
            "reward.py": _REWARD_WITHOUT_ANSWER,
            "test_reward.py": _TEST_WITHOUT_ANSWER,
        }
    texts = {"reward.py": _REWARD, "test_reward.py": _TEST}
    return {name: text.replace("COLUMN", column) for name, text in texts.items()}


_REWARD = '''\
"""The reward of run.yaml. Test it with: python -m pytest test_reward.py."""


def reward(response: str, COLUMN: str) -> float:
    """Return 1 for the right answer, a little for what begins with it, else 0.

    Args:
        response: What the model wrote.
        COLUMN: The column of that name; every column of the row can be asked for.
    """
    given, right = response.strip(), COLUMN.strip()
    if given == right:
        return 1.0
    return 0.2 if given.startswith(right) else 0.0
'''
_REWARD_WITHOUT_ANSWER = '''\
"""The reward of run.yaml. Test it with: python -m pytest test_reward.py."""


def reward(prompt: str, response: str) -> float:
    """Return a number: here 1 for an answer of ten words, less for other lengths.

    Args:
        prompt: The prompt.
        response: What the model wrote; every column of the row can be asked for too.
    """
    return 1.0 / (1.0 + abs(len(response.split()) - 10))
'''
_TEST = '''\
"""Tests of reward.py; run them by: python -m pytest test_reward.py."""

import pytest
from reward import reward

from rl_envs.testing import Examination, assert_passed, examine_environment

# Replace these by tasks like yours.
ROWS = [
    {"prompt": "max 274 = ", "COLUMN": "7"},
    {"prompt": "max 309 = ", "COLUMN": "9"},
    {"prompt": "max 551 = ", "COLUMN": "5"},
]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("7", 1.0), (" 7 ", 1.0), ("7 or 4", 0.2), ("4", 0.0), ("", 0.0)],
)
def test_reward_of_a_response(response: str, expected: float) -> None:
    assert reward(response, COLUMN="7") == expected


def test_only_right_responses_earn_the_full_reward() -> None:
    # Tries right, empty, garbled and slightly changed answers, in several orders, and
    # in another process.
    examination = Examination(gold_column="COLUMN", full_reward=1.0)
    assert_passed(examine_environment(reward, ROWS, examination))
'''
_TEST_WITHOUT_ANSWER = '''\
"""Tests of reward.py; run them by: python -m pytest test_reward.py."""

import pytest
from reward import reward

from rl_envs.testing import Examination, assert_passed, examine_environment

# Replace these by tasks like yours; `best` is a response that earns the full reward.
ROWS = [
    {"prompt": "Birds?", "best": "Most birds fly, all lay eggs, and some also sing."},
    {"prompt": "Rain?", "best": "It falls from clouds, fills ponds and cools the air."},
]


@pytest.mark.parametrize(
    ("num_words", "expected"), [(10, 1.0), (9, 0.5), (11, 0.5), (0, 1 / 11)]
)
def test_reward_of_a_response(num_words: int, expected: float) -> None:
    assert reward("Write.", "word " * num_words) == pytest.approx(expected)


def test_only_good_responses_earn_the_full_reward() -> None:
    # A changed character leaves ten words ten words, so such changes may be accepted.
    examination = Examination(gold_column="best", max_accepted_changes=1.0)
    assert_passed(examine_environment(reward, ROWS, examination))
'''
