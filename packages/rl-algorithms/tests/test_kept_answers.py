"""What is written for a kept answer, on hand-made rollouts."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from rl_algorithms.losses.kept_rows import (
    KEPT_LOGPROBS,
    KEPT_ROW,
    RowLogprobs,
    kept_logprobs,
)
from rl_algorithms.rollout.branches import Branch, unfold_branches
from rl_algorithms.rollout.result import Outcome, RolloutResult
from rl_algorithms.trainers.sampling.kept_answers import KeptAnswers
from rl_distributed.batch.batched_data_dict import AnyRows, BatchedDataDict
from rl_distributed.metrics.values import reduce_metrics, to_floats
from rl_envs.outcomes import ConversationOutcome

# A character of two tokens, and one that is never complete.
PIECES = {3: "a", 4: "b", 5: "\ufffd", 6: "\ufffd", 7: "<b>"}


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids).replace("\ufffd\ufffd", "é")


TOKENIZER: Any = types.SimpleNamespace(decode=decode)


def rollout(tokens: list[list[int]], **columns: Any) -> RolloutResult:
    """Return answers of these tokens, each after a one-token prompt."""
    num_rows, width = len(tokens), max(map(len, tokens)) + 1
    ids = torch.zeros((num_rows, width), dtype=torch.int64)
    mask = torch.zeros((num_rows, width))
    for row, answer in enumerate(tokens):
        ids[row, 1 : len(answer) + 1] = torch.tensor(answer)
        mask[row, 1 : len(answer) + 1] = 1.0
    rows: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": ids,
            "token_mask": mask,
            "token_versions": torch.where(mask != 0, 2, -1),
            "rewards": torch.zeros(num_rows),
            "group_index": torch.zeros(num_rows, dtype=torch.int64),
            "outcome": torch.zeros(num_rows, dtype=torch.int8),
            "generation_lengths": mask.sum(1).long(),
            "branches": [()] * num_rows,
            "texts": [decode(answer) for answer in tokens],
            "metadata": [{}] * num_rows,
            "ending": [ConversationOutcome.FINISHED] * num_rows,
            **columns,
        }
    )
    logs = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        for text in rows["texts"]
    ]
    ones: list[int] = [1] * num_rows
    return RolloutResult(rows, {}, logs, ones, [None] * num_rows, [{}] * num_rows)


def keep(result: RolloutResult, num_kept: int = 4) -> KeptAnswers:
    found = KeptAnswers(TOKENIZER, num_kept, seed=3)
    found.choose(result, 0)
    return found


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([3, 4], ["a", "b"]),
        ([3, 5, 6, 4], ["a", "é", "", "b"]),
        ([5], ["\ufffd"]),
        ([5, 3], ["\ufffd", "a"]),
        ([7, 7], ["<b>", "<b>"]),
    ],
)
def test_each_token_has_its_text(tokens: list[int], texts: list[str]) -> None:
    (record,) = keep(rollout([tokens])).take()
    assert record["tokens"] == texts
    assert "logprobs" not in record
    assert record["versions"] == [[2, len(tokens)]]


def test_versions_are_runs_and_parts_follow_each_other() -> None:
    part = Branch(
        torch.tensor([0, 4, 4]),
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([0.0, -0.5, -0.25]),
        torch.tensor([-1, 0, 1]),
    )
    result = rollout(
        [[3, 3]],
        branches=[(part,)],
        generation_logprobs=torch.tensor([[0.0, -1.00004, -2.0]]),
    )
    (record,) = keep(result).take()
    assert record["tokens"] == ["b", "b", "a", "a"]
    assert record["logprobs"] == [-0.5, -0.25, -1.0, -2.0]
    assert record["versions"] == [[0, 1], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("advantages", "noted"),
    [
        (torch.tensor([0.123456, 1.0]), {"advantage": 0.1235}),
        (torch.full((2, 3), 0.5), {"advantage": 0.5}),
        (torch.tensor([[9.0, 0.5, 0.25]] * 2), {"advantages": [0.5, 0.25]}),
    ],
)
def test_advantages_are_found_by_the_number_of_the_row(
    advantages: torch.Tensor, noted: dict[str, Any]
) -> None:
    result = rollout([[3, 3], [3, 4], [4, 4]], rewards=torch.tensor([0.0, 1.0, 0.5]))
    kept = keep(result, num_kept=1)  # the one with the best reward
    rows = result.rows.select_indices([1, 2])
    rows["advantages"] = advantages
    kept.note_training(rows)
    assert "row_number" not in rows
    (record,) = kept.take()
    assert record["response"] == "ab"
    assert {k: v for k, v in record.items() if "advantage" in k} == noted
    assert kept.take() == []


def note_logprobs(kept: KeptAnswers, rows: AnyRows, logprobs: torch.Tensor) -> None:
    """Record the log-probs [R, S] of rows as a step does: a micro-batch per row."""
    kept.note_training(rows)
    found = [
        kept_logprobs(rows.select_indices([row]), logprobs[row : row + 1, 1:])
        for row in reversed(range(rows.size))
    ]
    merged = reduce_metrics(found)
    assert to_floats(merged) == {}
    kept.note_logprobs(merged[KEPT_LOGPROBS].values)


def test_rows_without_kept_answers_get_no_column() -> None:
    result = rollout([[3, 3], [3, 4]], rewards=torch.tensor([0.0, 1.0]))
    kept = keep(result, num_kept=1)
    rows = result.rows.select_indices([0])
    rows["advantages"] = torch.zeros(1)
    kept.note_training(rows)
    assert not {"row_number", KEPT_ROW} & set(rows)
    assert kept_logprobs(rows, torch.zeros(1, 2)) == {}


def test_log_probs_of_the_first_pass_count() -> None:
    first, second = RowLogprobs({1: [-1.0]}), RowLogprobs({1: [-2.0], 2: [-3.0]})
    assert first.merge(second).values == {1: [-1.0], 2: [-3.0]}


def test_log_probs_of_the_trainer_are_found_by_the_number_of_the_row() -> None:
    result = rollout([[3, 3], [3, 4], [4]], rewards=torch.tensor([0.0, 1.0, 0.5]))
    kept = keep(result)
    # As in training: reordered, one dropped, one copied as padding.
    rows = result.rows.select_indices([2, 1, 2])
    rows["advantages"] = torch.zeros(3)
    note_logprobs(kept, rows, -torch.arange(9.0).view(3, 3) - 0.00004)
    found = {r["response"]: r.get("trainer_logprobs") for r in kept.take()}
    assert found == {"aa": None, "ab": [-4.0, -5.0], "b": [-1.0]}


@pytest.mark.parametrize("is_whole", [True, False])
def test_log_probs_of_the_trainer_follow_the_parts(is_whole: bool) -> None:
    parts = tuple(
        Branch(
            torch.tensor([0, *tokens]),
            torch.tensor([0.0] + [1.0] * len(tokens)),
            torch.zeros(len(tokens) + 1),
            torch.tensor([-1] + [0] * len(tokens)),
        )
        for tokens in ([4, 4], [4])
    )
    result = rollout(
        [[3, 3]],
        branches=[parts],
        generation_logprobs=torch.zeros((1, 3)),
        input_lengths=torch.tensor([3]),
    )
    kept = keep(result)
    rows = unfold_branches(result.rows.copy())
    rows["advantages"] = torch.zeros(3)
    logprobs = -torch.arange(9.0).view(3, 3)
    if not is_whole:
        rows, logprobs = rows.select_indices([0, 1]), logprobs[:2]
    note_logprobs(kept, rows, logprobs)
    (record,) = kept.take()
    assert record["tokens"] == ["b", "b", "b", "a", "a"]
    expected = [-4.0, -5.0, -7.0, -1.0, -2.0] if is_whole else None
    assert record.get("trainer_logprobs") == expected


def test_answers_without_a_score_come_last() -> None:
    outcome = torch.tensor([Outcome.INFRASTRUCTURE_ERROR, Outcome.OK, Outcome.OK])
    result = rollout(
        [[3], [4], [7]], rewards=torch.tensor([0.0, -2.0, -1.0]), outcome=outcome
    )
    found = [(r["response"], r["reward"]) for r in keep(result, 2).take()]
    assert found == [("b", -2.0), ("<b>", -1.0)]
    assert len(keep(result, 3).take()) == 3


def test_groups_are_drawn_by_seed_and_step() -> None:
    result = rollout([[3]] * 8, group_index=torch.arange(4).repeat_interleave(2))
    drawn = set()
    for step in range(20):
        kept = KeptAnswers(TOKENIZER, 2, seed=3)
        kept.choose(result, step)
        groups = {record["group"] for record in kept.take()}
        assert len(groups) == 1
        drawn |= groups
    assert drawn == {0, 1, 2, 3}


def test_of_several_rollouts_of_a_step_the_first_is_kept() -> None:
    first, second = rollout([[3]]), rollout([[4]])
    kept = keep(first)
    kept.choose(second, 0)
    assert second.rows["row_number"].tolist() == [1]
    assert [record["response"] for record in kept.take()] == ["a"]
    kept.choose(second, 1)
    assert [record["response"] for record in kept.take()] == ["b"]


def test_rejected_answers_are_kept_beside_the_others() -> None:
    verdicts = ["accepted", None, "rejected", "rejected"]
    result = rollout(
        [[3], [4], [3, 3], [4, 4]],
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        metadata=[{"second_check": v} if v else {} for v in verdicts],
    )
    found = {r["response"]: r.get("second_check") for r in keep(result, 1).take()}
    assert found == {"a": "accepted", "aa": "rejected"}
    assert keep(result, 0).take() == []
