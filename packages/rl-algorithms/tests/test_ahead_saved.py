"""Finished answers in a checkpoint folder, without a run."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
import torch

from rl_algorithms.asynchronous.checkpoint_state import saved_rows
from rl_algorithms.asynchronous.staleness import StalenessRule
from rl_algorithms.rollout.branches import Branch
from rl_algorithms.rollout.trajectories import PlayedRow, Trajectories, TrajectoryNotes
from rl_algorithms.trainers.ahead.answer_files import read_answers, write_answers
from rl_algorithms.trainers.ahead.jobs import FinishedAnswer
from rl_algorithms.trainers.ahead.saved import SavedAhead
from rl_envs.outcomes import ConversationOutcome

ENDING = next(iter(ConversationOutcome))


def played(*, shift=0, metadata=None, error=None):
    """Return a row whose tensors have distinguishable values and types."""
    tokens = torch.arange(6).reshape(1, 6) + shift
    branch = Branch(
        tokens[0, :2],
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.5, -0.5]),
        tokens[0, 2:4],
    )
    notes = TrajectoryNotes(
        is_active=torch.tensor([False]),
        cut_answers=torch.tensor([shift]),
        turn_limit_reached=torch.tensor([True]),
        prompt_lengths=torch.tensor([3]),
        env_tokens=torch.tensor([0]),
        errors=[error],
        message_logs=[[{"role": "user", "content": "a", "token_ids": tokens[0, :3]}]],
        num_prompt_messages=[1],
        answers=["b"],
        extra_env_info=[{"place": (1, "x"), "array": np.arange(4.0).reshape(2, 2)}],
    )
    return Trajectories(
        input_ids=tokens,
        input_lengths=torch.tensor([6]),
        token_mask=tokens.float() / 7,
        sample_mask=torch.tensor([1.0]),
        generation_logprobs=tokens.double() / -3,
        token_versions=tokens - 1,
        rewards=torch.tensor([0.25 + shift]),
        named_rewards={"reward/length": torch.tensor([2.0])},
        group_index=torch.tensor([0]),
        truncated=torch.tensor([True]),
        generation_lengths=torch.tensor([3]),
        num_turns=torch.tensor([1]),
        weight_version=torch.tensor([1]),
        outcome=torch.tensor([0]),
        branches=[(branch,)],
        texts=["ab"],
        metadata=[metadata],
        ending=[ENDING],
        notes=notes,
    )


def answer(prompt, version, *, sample=0, **row):
    return FinishedAnswer(prompt, sample, 2, version, PlayedRow(played(**row)))


def same(found, expected):
    """Return whether two values are equal, tensors bitwise and of the same types."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(
            same(found[key], expected[key]) for key in found
        )
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if hasattr(found, "__dataclass_fields__"):
        return all(
            same(getattr(found, field.name), getattr(expected, field.name))
            for field in fields(found)
        )
    return bool(found == expected)


def state(*groups, step=3):
    """Return a saved state with these groups: prompt, rows and versions of answers."""
    return {
        "step": step,
        "groups": [
            {
                "prompt": prompt,
                "seed_attempts": [0] * len(rows),
                "failures": [0] * len(rows),
                "answers": [{"rows": number} for number in rows],
            }
            for prompt, rows in groups
        ],
    }


class TestFiles:
    def test_every_value_comes_back(self, tmp_path):
        answers = {
            4: answer(1, 2, shift=10),
            7: answer(1, 1, sample=1, shift=50, metadata={"n": [1, (2.5, None)]}),
        }
        assert write_answers(tmp_path, answers) == set()
        found = read_answers(tmp_path)
        assert list(found) == [4, 7]
        assert all(same(found[rows], answers[rows]) for rows in answers)

    @pytest.mark.parametrize(
        "odd",
        [
            {"metadata": object()},
            {"error": ValueError("x")},
            {"metadata": {1: "a"}},
            {"metadata": np.arange(3, dtype=">f4")},
            {"metadata": torch.zeros(2, dtype=torch.complex128)},
            {"metadata": 10**5_000},
        ],
        ids=["object", "error", "number as key", "byte order", "complex", "long"],
    )
    def test_what_is_not_plain_is_left_out_alone(self, tmp_path, odd):
        answers = {
            1: answer(0, 0, shift=1),
            2: answer(0, 0, shift=20, **odd),
            3: answer(0, 0, shift=30),
        }
        assert write_answers(tmp_path, answers) == {2}
        found = read_answers(tmp_path)
        # Its partially written tensors must not shift those of the next one.
        assert same(found, {1: answers[1], 3: answers[3]})
        # Nor does it remain in the file.
        write_answers(tmp_path / "others", {1: answers[1], 3: answers[3]})
        name = "asynchronous/answers.safetensors"
        sizes = {(tmp_path / at / name).stat().st_size for at in ("", "others")}
        assert len(sizes) == 1

    def test_single_values_keep_their_shape(self, tmp_path):
        held = [np.array(5), torch.tensor(2.5), np.arange(6).reshape(2, 3).T]
        write_answers(tmp_path, {1: answer(0, 0, metadata=held)})
        [found] = read_answers(tmp_path)[1].played.batch.metadata
        assert [value.shape for value in found] == [(), (), (3, 2)]
        assert all((a == b).all() for a, b in zip(found, held, strict=True))

    def test_an_answer_holds_only_its_own_tensors(self, tmp_path):
        write_answers(tmp_path, {n: answer(n, 0) for n in range(50)})
        tokens = read_answers(tmp_path)[9].played.batch.input_ids
        assert tokens.untyped_storage().nbytes() == tokens.numel() * 8

    def test_another_format_is_sampled_again(self, tmp_path):
        write_answers(tmp_path, {1: answer(0, 0)})
        path = tmp_path / "asynchronous" / "answers.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
        assert read_answers(tmp_path) == {}


class TestSaved:
    def test_missing_rows_are_taken_out_of_the_state(self, tmp_path):
        write_answers(tmp_path, {1: answer(5, 2), 9: answer(8, 2)})
        found = SavedAhead.read(state((5, [1, 2]), (6, [3])), tmp_path)
        assert saved_rows(found.state) == [1]
        # Anything the state does not name is dropped.
        assert list(found.answers) == [1]

    def test_without_a_folder_all_are_sampled_again(self):
        found = SavedAhead.read(state((5, [1, 2])), None)
        assert saved_rows(found.state) == []
        assert found.answers == {}

    @pytest.mark.parametrize(
        ("versions", "kept"),
        [
            # Two prompts per step, from step 3 on, with tokens at most one step old.
            ([3, 3, 3], [0, 1, 2]),
            ([2, 2, 3], [0, 1, 2]),
            # The third would come in step 4.
            ([2, 2, 2], [0, 1]),
            ([1, 3, 2], [1, 2]),
            # Dropped groups take no place from the others.
            ([1, 2, 2], [1, 2]),
        ],
    )
    def test_a_lower_limit_gives_up_what_no_step_can_take(self, versions, kept):
        rule = StalenessRule(1, 2)
        answers = {n: answer(n, version) for n, version in enumerate(versions)}
        saved = SavedAhead(state(*((n, [n]) for n in answers)), answers)
        found = saved.within(rule)
        assert list(found.answers) == saved_rows(found.state) == kept

    def test_the_oldest_answer_counts_for_its_prompt(self):
        answers = {1: answer(5, 1), 2: answer(5, 3, sample=1), 3: answer(6, 3)}
        saved = SavedAhead(state((5, [1, 2]), (6, [3])), answers)
        found = saved.within(StalenessRule(1, 2))
        assert list(found.answers) == saved_rows(found.state) == [3]
