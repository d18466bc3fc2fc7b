"""The index of answers by step and chunk, while a trainer keeps writing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles, rollout_parts
from rl_cli.report.answer_index import AnswerIndex, _step_and_reward
from rl_cli.report.sample_records import checked_record

MakeRun = Callable[..., Path]


def answer(reward: float, size: int = 10) -> dict[str, Any]:
    return {"reward": reward, "group": 1, "prompt": "q", "response": "x" * size}


def records_of(index: AnswerIndex) -> list[dict[str, Any]]:
    return [r for n in range(index.num_chunks) for r in index.chunk(n)]


def by_step(index: AnswerIndex) -> dict[Any, list[dict[str, Any]]]:
    """Return what a page shows of each step, from the rows."""
    return {
        step: [
            record
            for number in range(first, last + 1)
            for record in index.chunk(number)
            if record["step"] == step
        ]
        for step, _, _, first, last in index.rows()
    }


def test_an_index_grows_with_its_files(tmp_path: Path) -> None:
    files, index = RolloutFiles(tmp_path, 1 << 23), AnswerIndex(tmp_path, "training")
    index.update()
    assert (index.rows(), index.num_chunks) == ([], 0)
    for step in range(1, 101):
        files.add(step, [answer(step / 100, 2000), answer(0.0, 2000)])
        if step % 7 == 0:
            index.update()
    index.update()
    fresh = AnswerIndex(tmp_path, "training")
    fresh.update()
    assert index.rows() == fresh.rows()
    assert index.generation == 0
    assert index.num_chunks > 1
    assert [row[:3] for row in index.rows()] == [
        [step, 2, step / 200] for step in range(1, 101)
    ]
    found = by_step(index)
    assert [[r["reward"] for r in found[step]] for step in range(1, 101)] == [
        [step / 100, 0.0] for step in range(1, 101)
    ]


def test_chunks_do_not_go_over_files(tmp_path: Path) -> None:
    files, index = RolloutFiles(tmp_path, 1 << 22), AnswerIndex(tmp_path, "training")
    for step in range(1, 61):
        files.add(step, [answer(1.0, 20_000)])
    index.update()
    assert len(rollout_parts(tmp_path)) == 3
    assert [r["step"] for r in records_of(index)] == list(range(1, 61))


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    RolloutFiles(tmp_path, 1 << 20).add(1, [answer(1.0)])
    (path,) = rollout_parts(tmp_path)
    line, index = path.read_bytes(), AnswerIndex(tmp_path, "training")
    for size in range(len(line) + 1):
        path.write_bytes(line[:size])
        index.update()
        assert len(index.rows()) == (size == len(line))
    assert len(records_of(index)) == 1


@pytest.mark.parametrize("event", ["resumed", "thinned out", "begun again", "removed"])
def test_it_begins_again_where_files_are_others(tmp_path: Path, event: str) -> None:
    files, index = RolloutFiles(tmp_path, 1 << 22), AnswerIndex(tmp_path, "training")
    for step in range(1, 61):
        files.add(step, [answer(1.0, 20_000)])
    index.update()
    if event == "resumed":
        RolloutFiles(tmp_path, 1 << 22).resume_at(50)
    elif event == "thinned out":
        rollout_parts(tmp_path)[1].unlink()
    else:
        for path in rollout_parts(tmp_path):
            path.unlink()
        if event == "begun again":
            files.add(1, [answer(0.5)])
    # Earlier results must not break a page that still requests them.
    assert all("step" in record for record in records_of(index))
    index.update()
    fresh = AnswerIndex(tmp_path, "training")
    fresh.update()
    assert index.rows() == fresh.rows()
    assert index.generation == 1
    assert [r["step"] for r in records_of(index)] == [r["step"] for r in files.read()]


@given(
    st.integers(0, 10**6),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    st.text(),
)
def test_the_quick_look_at_a_line_sees_what_parsing_sees(
    step: int, reward: float, text: str
) -> None:
    record = {"step": step, "reward": reward, "prompt": text}
    quick = json.dumps(record, separators=(",", ":")).encode()
    slow = json.dumps(record).encode()
    assert _step_and_reward(quick) == _step_and_reward(slow) == (step, reward)


@pytest.mark.parametrize(
    "line", ["", "null", "[1]", "{}", '{"step":"1"}', '{"step":true}', "{" * 99_999]
)
def test_an_odd_line_is_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "validation_samples.jsonl"
    path.write_text(f'{line}\n{{"step": 3, "reward": 1.0}}\n')
    index = AnswerIndex(tmp_path, "held-out")
    index.update()
    assert [record["step"] for record in records_of(index)] == [3]


@pytest.mark.parametrize(
    ("given_fields", "shown"),
    [
        ({"reward": float("nan")}, {}),
        ({"reward": True, "group": "1"}, {}),
        ({"second_check": "rejected"}, {"second_check": "rejected"}),
        ({"rewards": {"a": 1, "b": "x", "c": None}}, {"rewards": {"a": 1}}),
        ({"prompt": 3, "response": ["x"], "expected": 4}, {"expected": "4"}),
        ({"tokens": ["a"], "logprobs": [0.0, 1.0]}, {}),
        ({"tokens": ["a"], "versions": [[3, 2]]}, {}),
        ({"tokens": ["a"], "versions": [[3, "1"]]}, {}),
        (
            {"tokens": ["a", "b"], "advantages": [0.5, None], "versions": [[3, 2]]},
            {"tokens": ["a", "b"], "advantages": [0.5, None], "versions": [[3, 2]]},
        ),
        (
            {"messages": [{"role": "tool", "name": "sum", "content": "4"}, 7]},
            {"messages": [["tool sum", "4"]]},
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
            {"messages": [["assistant", '[{"name": "f"}]']]},
        ),
    ],
)
def test_only_fields_of_the_right_type_are_shown(
    given_fields: dict[str, Any], shown: dict[str, Any]
) -> None:
    assert checked_record({"step": 1, **given_fields}) == {"step": 1, **shown}
