"""The base of single-response worlds: rows, verdicts and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rl_envs.errors import MessageLogError
from rl_envs.testing import check_environment
from rl_envs.worlds.verdict import (
    Columns,
    Given,
    Verdict,
    VerdictEnvironment,
    last_tagged,
)


class Vowels(VerdictEnvironment[int]):
    """Counts vowels; a blank response is not scored."""

    def read_row(self, columns: Columns, row: int) -> int:
        given = columns.get("answer") if isinstance(columns, Mapping) else None
        if type(given) is not int:
            raise MessageLogError(f"metadata[{row}] must have 'answer': got {given!r}")
        return given

    def check(self, given: Given[int]) -> Verdict:
        if given.response.isspace():
            return Verdict(math.nan, "not scored")
        found = sum(given.response.count(letter) for letter in "aeiou")
        score = float(found == given.task and given.response != given.prompt)
        return Verdict(score, f"it has {found} vowels", str(found))


def log_of(response: str, prompt: Any = "Write.") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": response},
    ]


def test_each_row_has_a_verdict() -> None:
    rows = [{"answer": 2, "id": 7}, {"answer": 3}, {"answer": 0}, {"answer": 2}]
    logs = [log_of("banane"), log_of("aaa"), log_of(" "), log_of("aa", "aa")]
    found = Vowels().step(logs, rows)
    rewards = [float(reward) for reward in found.rewards]
    assert rewards[:2] == [0.0, 1.0]
    assert math.isnan(rewards[2])
    assert rewards[3] == 0.0
    assert found.terminateds.all()
    assert found.answers == ["3", "3", None, "2"]
    assert found.metadata[0] == {"answer": 2, "id": 7, "correct": False}
    assert [row["correct"] for row in found.metadata] == [False, True, False, False]
    assert found.observations[0] == {
        "role": "environment",
        "content": "it has 3 vowels",
    }
    batch = {"rewards": found.rewards, "metadata": found.metadata}
    metrics = Vowels().global_post_process_and_metrics(batch)[1]
    assert metrics["accuracy"] == 0.25
    assert metrics["unscored_fraction"] == 0.25


def test_the_prompt_is_read_only_where_it_is_asked_for() -> None:
    pictures = [{"type": "image", "url": "a.png"}]
    assert Vowels().step([log_of(" ", pictures)], [{"answer": 1}]).answers == [None]
    with pytest.raises(MessageLogError, match=r"message_log_batch\[0\].*must be text"):
        Vowels().step([log_of("a", pictures)], [{"answer": 1}])


def test_rows_that_cannot_be_read_are_named() -> None:
    rows: Sequence[Any] = [{"answer": 1}, {}, None, {"answer": "1"}]
    assert list(Vowels().unusable_rows(rows)) == [1, 2, 3]
    with pytest.raises(MessageLogError, match=r"metadata\[0\] must have 'answer'"):
        Vowels().step([log_of("a")], [{}])


def test_several_can_be_judged_at_a_time() -> None:
    class Ranked(Vowels):
        def check_all(self, given: Sequence[Given[int]]) -> list[Verdict]:
            longest = max((len(one.response) for one in given), default=0)
            return [
                Verdict(float(len(one.response) == longest), f"row {one.row}")
                for one in given
            ]

    found = Ranked().step([log_of("a"), log_of("abc")], [{"answer": 1}] * 2)
    assert [float(reward) for reward in found.rewards] == [0.0, 1.0]
    assert [said["content"] for said in found.observations] == ["row 0", "row 1"]  # type: ignore[call-overload]


def test_it_fulfils_the_contract() -> None:
    logs = [log_of("a"), log_of("bb"), log_of("")]
    check_environment(Vowels(), logs, [{"answer": 1}] * 3)


def test_the_last_tag_counts() -> None:
    assert last_tagged("a <answer>b</answer> c <answer>d</answer>") == "d"
    assert last_tagged("<answer>b") == "b"
    assert last_tagged("<answer></answer>") == ""
    assert last_tagged("b") is None
