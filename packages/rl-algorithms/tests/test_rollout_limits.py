"""Limits of single tasks, and how the end of a conversation is reported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.errors import DataError
from rl_algorithms.rollout import Outcome, RolloutConfig, RolloutEngine
from rl_algorithms.rollout.judge import Judge as CheckedJudge
from rl_algorithms.trainers.sampling.unusable_rows import check_rows
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_envs.outcomes import ConversationOutcome
from rl_envs.task_limits import TaskLimits

_spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)
EOS = scripted.EOS
TOKEN = 3


@pytest.fixture(scope="module")
def tokenizer():
    return scripted.ambiguous_tokenizer()


class Talks(EnvironmentInterface):
    """Replies "b" until the turns in the row's column `until` are over; keeps input."""

    def __init__(self):
        self.seen, self.limits_seen = [], []

    def step(self, message_log_batch, metadata):
        turns = [
            sum(m["role"] == "assistant" for m in log) for log in message_log_batch
        ]
        self.seen += [log[-1]["content"] for log in message_log_batch]
        self.limits_seen += [row.get("task_limits") for row in metadata]
        done = [n >= row["until"] for n, row in zip(turns, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": "b"}] * len(turns),
            metadata=[
                {**row, "outcome": row["says"]} if ended and "says" in row else row
                for ended, row in zip(done, metadata, strict=True)
            ],
            next_stop_strings=[None] * len(turns),
            rewards=[1.0] * len(turns),
            terminateds=done,
            answers=None,
        )


def play(tokenizer, rows, *, num_tokens=5, environment=None, cut=False, **settings):
    """Open rows with answers of `num_tokens`; the last one ends the turn."""
    environment = environment or Talks()
    tail = [TOKEN] * num_tokens if cut else [TOKEN] * (num_tokens - 1) + [EOS]
    generator = scripted.TokenGenerator(lambda call, row, seed: tail)
    config = RolloutConfig(**{"max_turns": 6, **settings})
    engine = RolloutEngine(generator, environment, tokenizer, config)
    prompts = process_prompts(
        [{"prompt": "a", "until": 4, **row} for row in rows], tokenizer
    )
    batch = rl_collate_fn(prompts[:], pad_token_id=tokenizer.pad_token_id)
    return engine, batch, environment


def run(tokenizer, rows, **settings):
    engine, batch, environment = play(tokenizer, rows, **settings)
    return engine.run(batch), environment


def test_each_task_has_its_own_limits_and_others_go_on(tokenizer):
    rows = [
        {"task_limits": {"turns": 2}},
        {"task_limits": {"tokens": 12}},
        {"task_limits": {"seconds": 1e-9}},
        {},
    ]
    result, _ = run(tokenizer, rows)
    assert result.rows["num_turns"].tolist() == [2, 3, 1, 4]
    assert result.rows["generation_lengths"].tolist() == [10, 12, 5, 20]
    assert result.rows["ending"] == [
        ConversationOutcome.OUT_OF_TURNS,
        ConversationOutcome.OUT_OF_TOKENS,
        ConversationOutcome.OUT_OF_TIME,
        ConversationOutcome.FINISHED,
    ]
    truncated = [Outcome.TRUNCATED] * 3
    assert result.rows["outcome"].tolist() == [*truncated, Outcome.OK]
    # They are trained on: the policy caused the end.
    assert result.rows["sample_mask"].tolist() == [1.0] * 4
    assert float(result.metrics["outcome/out_of_time"]) == 0.25
    assert float(result.metrics["max_turns_reached_rate"]) == 0.25
    assert float(result.metrics["outcome/error"]) == 0.0


def test_an_answer_is_cut_before_it_is_judged(tokenizer):
    rows = [{"task_limits": {"tokens": 3}, "until": 1}, {"until": 1}]
    result, environment = run(tokenizer, rows)
    whole = tokenizer.decode([TOKEN] * 4)
    assert environment.seen == [tokenizer.decode([TOKEN] * 3), whole]
    assert result.rows["token_mask"].sum(1).tolist() == [3.0, 5.0]
    assert result.rows["truncated"].tolist() == [True, False]
    assert result.message_logs[0][-1]["truncated"] is True
    logprobs = result.rows["generation_logprobs"]
    assert (logprobs[result.rows["token_mask"] == 0] == 0).all()
    [length, _] = result.rows["input_lengths"].tolist()
    assert (result.rows["input_ids"][0, length:] == tokenizer.pad_token_id).all()


def test_rows_come_before_the_environment(tokenizer):
    class Limited(Talks):
        task_limits = TaskLimits(turns=1, memory_mib=64)

    rows = [{}, {"task_limits": {"turns": 3}}]
    result, environment = run(tokenizer, rows, environment=Limited())
    assert result.rows["num_turns"].tolist() == [1, 3]
    # In the metadata, so that environments that run programs know the memory limit.
    assert [limits["memory_mib"] for limits in environment.limits_seen] == [64] * 4
    assert environment.limits_seen[1]["turns"] == 3


def test_a_conversation_at_its_own_pace_ends_the_same(tokenizer):
    rows = [{"task_limits": {"turns": 2, "tokens": 7}}]
    expected, _ = run(tokenizer, rows)
    engine, batch, environment = play(tokenizer, rows)
    judge = CheckedJudge(environment)
    opened = engine.open(engine.prepare(batch), seed=0, step=0, place=0, sample=0)
    while opened.goes_on:
        opened.answer(engine._generation.generate(opened.question()))
        opened.judge(judge.step([opened.log], [opened.metadata]))
    result = engine.finish([[opened.played()]])
    assert result.rows["ending"] == expected.rows["ending"]
    [length] = result.rows["input_lengths"].tolist()
    assert expected.rows["input_lengths"].tolist() == [length]
    wanted = expected.rows["input_ids"][0, :length]
    assert result.rows["input_ids"][0, :length].tolist() == wanted.tolist()
    assert result.rows["ending"] == [ConversationOutcome.OUT_OF_TURNS]


def test_what_the_environment_says_and_what_it_does_not(tokenizer):
    rows = [{"until": 1, "says": "solved"}, {"until": 1, "says": "lost"}, {"until": 1}]
    result, _ = run(tokenizer, rows, cut=True)
    assert [each.value for each in result.rows["ending"]] == [
        "solved",
        "lost",
        "out_of_tokens",
    ]
    result, _ = run(tokenizer, [{}], max_turns=2)
    assert result.rows["ending"] == [ConversationOutcome.OUT_OF_TURNS]
    sample = result.sample(0)
    assert sample.ending is ConversationOutcome.OUT_OF_TURNS
    result, _ = run(tokenizer, [{}], max_total_sequence_length=12)
    assert result.rows["ending"] == [ConversationOutcome.OUT_OF_TOKENS]


def test_a_failure_is_an_error_whatever_was_said_before(tokenizer):
    class Unscored(Talks):
        def step(self, message_log_batch, metadata):
            judged = super().step(message_log_batch, metadata)
            return judged._replace(rewards=[float("nan"), 1.0])

    rows = [{"until": 1, "says": "solved"}] * 2
    result, _ = run(
        tokenizer, rows, environment=Unscored(), on_environment_error="drop"
    )
    assert [each.value for each in result.rows["ending"]] == ["error", "solved"]
    assert float(result.metrics["outcome/error"]) == 0.5


def test_wrong_limits_are_found_before_a_run(tokenizer):
    rows = [
        {"idx": 4, "extra_env_info": {"task_limits": {"turns": 0}}},
        {"idx": 7, "extra_env_info": {"task_limits": {"token": 3}}},
        {"idx": 8, "extra_env_info": {"task_limits": 3}},
        {"idx": 9, "extra_env_info": {"task_limits": {"turns": 1, "seconds": None}}},
    ]
    with pytest.raises(DataError) as caught:
        check_rows(Talks(), rows, "train")
    said = str(caught.value)
    assert "3 of 4 rows" in said
    for part in ("row 4", "row 7", "row 8", "task_limits", "tokens"):
        assert part in said
