"""The state of a rollout: its columns, selected and replaced rows."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from rl_algorithms.rollout.result import TRAJECTORIES
from rl_algorithms.rollout.trajectories import Trajectories, TrajectoryNotes
from rl_envs.outcomes import ConversationOutcome


def trajectories(num_rows: int, width: int, first: int, **columns) -> Trajectories:
    number = torch.arange(first, first + num_rows)
    wide = number[:, None].expand(num_rows, width).clone()
    notes = TrajectoryNotes(
        is_active=number > 0,
        cut_answers=number,
        turn_limit_reached=number > 0,
        prompt_lengths=number,
        env_tokens=number,
        errors=[None] * num_rows,
        message_logs=[[{"role": "user", "content": str(n)}] for n in number.tolist()],
        num_prompt_messages=[1] * num_rows,
        answers=[str(n) for n in number.tolist()],
        extra_env_info=[{} for _ in number],
    )
    rows = Trajectories(
        input_ids=wide,
        input_lengths=torch.full((num_rows,), width),
        token_mask=torch.ones(num_rows, width),
        sample_mask=torch.ones(num_rows),
        generation_logprobs=-wide.float(),
        token_versions=wide,
        rewards=number.float(),
        named_rewards={},
        group_index=number,
        truncated=number < 0,
        generation_lengths=number,
        num_turns=number,
        weight_version=number,
        outcome=torch.zeros(num_rows, dtype=torch.int8),
        branches=[()] * num_rows,
        texts=[str(n) for n in number.tolist()],
        metadata=[None] * num_rows,
        ending=[ConversationOutcome.FINISHED] * num_rows,
        notes=notes,
    )
    return replace(rows, **columns)


def test_rows_are_what_the_schema_declares():
    rows = trajectories(2, 3, 0, named_rewards={"reward/a": torch.ones(2)}).rows()
    TRAJECTORIES.check(rows)
    declared = TRAJECTORIES.required.keys() | TRAJECTORIES.optional.keys()
    assert set(rows) == declared | {"reward/a"}
    without = trajectories(2, 3, 0, generation_logprobs=None).rows()
    assert set(without) == set(TRAJECTORIES.required)
    own = {field.name for field in fields(Trajectories)}
    assert own == declared | {"named_rewards", "notes"}


def test_select():
    chosen = trajectories(4, 3, 0).select(torch.tensor([3, 1]))
    assert chosen.size == 2
    assert chosen.texts == ["3", "1"]
    assert chosen.notes.answers == ["3", "1"]
    assert chosen.notes.prompt_lengths.tolist() == [3, 1]


def test_replaced_rows_may_be_wider_and_know_other_rewards():
    rows = trajectories(3, 2, 0, named_rewards={"reward/a": torch.ones(3)})
    others = trajectories(1, 4, 9, named_rewards={"reward/b": torch.zeros(1)})
    joined = rows.replaced(torch.tensor([1]), others, {"input_ids": 7})
    assert joined.texts == ["0", "9", "2"]
    assert joined.input_ids[0].tolist() == [0, 0, 7, 7]
    assert joined.input_ids[1].tolist() == [9] * 4
    nan = torch.nan
    expected = {"reward/a": [1.0, nan, 1.0], "reward/b": [nan, 0.0, nan]}
    assert joined.named_rewards.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            joined.named_rewards[name], torch.tensor(values), equal_nan=True
        )


def test_log_probs_of_some_rows_only_are_left_out():
    rows = trajectories(3, 2, 0)
    others = trajectories(1, 2, 9, generation_logprobs=None)
    assert rows.replaced(torch.tensor([1]), others, {}).generation_logprobs is None
    rows.generation_logprobs = None
    whole = trajectories(1, 2, 9)
    assert rows.replaced(torch.tensor([1]), whole, {}).generation_logprobs is None


def test_mark_stale():
    rows = trajectories(3, 2, 0)
    rows.mark_stale(current_version=2, max_staleness=1)
    assert rows.outcome.tolist() == [4, 0, 0]
    assert rows.sample_mask.tolist() == [0, 1, 1]
