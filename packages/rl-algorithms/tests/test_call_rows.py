"""Conversations that begin in one call: as if each had been played by itself."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings, strategies as st

from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_algorithms.rollout.call_rows import CallRows
from rl_algorithms.rollout.judge import Judge
from rl_algorithms.rollout.open_conversation import FirstTurns, judge_all
from rl_distributed.batch.batched_data_dict import BatchedDataDict

spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)
EOS = scripted.EOS


@dataclass
class Row:
    """A waiting row with a conversation."""

    conversation: Any
    sampling = (False, None)
    is_cancelled = False

    @property
    def opening(self):
        return self.conversation if self.conversation.is_new else None

    def question(self):
        return self.conversation.question()

    def answer(self, output):
        self.conversation.answer(output)


def answer_of(call, row, seed):
    """Answers of other lengths and tokens, by the seed alone."""
    return [3 + (seed + place) % 7 for place in range(1 + seed % 4)] + [EOS] * (
        seed % 2
    )


def judge_of(log, metadata):
    said = sum(message["role"] == "assistant" for message in log)
    return float(len(log[-1]["content"])), said >= metadata.get("until", 1), "ab"


class Played:
    """An engine, and conversations that it has opened."""

    def __init__(
        self,
        tokenizer,
        names,
        *,
        versions=lambda call: call,
        columns=None,
        max_turns=2,
        answers=answer_of,
    ):
        self.generator = scripted.TokenGenerator(answers, versions)
        self.judge = Judge(scripted.Judge(judge_of))
        self.pad = tokenizer.pad_token_id
        self.engine = RolloutEngine(
            self.generator,
            scripted.Judge(judge_of),
            tokenizer,
            RolloutConfig(max_turns=max_turns, max_total_sequence_length=40),
        )
        prompts = ["a", "abc:ab", "h"]
        columns = columns or [{"until": 1}, {"until": 2}, {"until": 1}]
        self.prompts = [
            self.engine.prepare(
                scripted.make_batch(
                    tokenizer, [prompt], **{key: [value[key]] for key in value}
                )
            )
            for prompt, value in zip(prompts, columns, strict=True)
        ]
        self.rows = [
            Row(
                self.engine.open(
                    self.prompts[prompt],
                    seed=5,
                    step=step,
                    place=prompt,
                    sample=sample,
                    attempt=attempt,
                )
            )
            for step, prompt, sample, attempt in names
        ]

    def call(self, rows):
        call = CallRows(rows)
        batch = call.questions(self.pad)
        call.answer(self.generator.generate(batch))
        return call

    def end(self):
        """Judge all rows, and play those that go on by themselves."""
        for row in self.rows:
            one = row.conversation
            while True:
                one.begin()
                one.judge(self.judge.step([one.log], [one.metadata]))
                if not one.goes_on:
                    break
                one.answer(self.generator.generate(one.question()))
        return [row.conversation.played().alone() for row in self.rows]

    def end_together(self):
        """Do the same, with one verdict for all rows of a turn."""
        left = [row.conversation for row in self.rows]
        while left:
            for one in left:
                one.begin()
            logs, metadata = [one.log for one in left], [one.metadata for one in left]
            judge_all(left, self.judge.step(logs, metadata))
            left = [one for one in left if one.goes_on]
            for one in left:
                one.answer(self.generator.generate(one.question()))
        return [row.conversation.played().alone() for row in self.rows]


def as_values(value):
    """Return something that `==` compares."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if dataclasses.is_dataclass(value):
        return {
            field.name: as_values(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: as_values(item) for key, item in value.items()}
    return value


def names(**limits):
    one = st.tuples(
        st.integers(0, 2), st.integers(0, 2), st.integers(0, 7), st.integers(0, 1)
    )
    return st.lists(one, unique=True, max_size=7, **limits)


@settings(max_examples=40, deadline=None)
@given(names(min_size=1), st.booleans())
def test_together_is_each_by_itself(chosen, of_tokens):
    tokenizer = scripted.ambiguous_tokenizer()
    # Versions of tokens, newer ones later, or one for all.
    versions = (lambda call: [4, 4, 5, 6, 6]) if of_tokens else (lambda call: 4)
    together = Played(tokenizer, chosen, versions=versions)
    together.call(together.rows)
    alone = Played(tokenizer, chosen, versions=versions)
    for row in alone.rows:
        row.answer(alone.generator.generate(row.question()))
    lengths = [row.conversation.num_tokens for row in together.rows]
    assert lengths == [row.conversation.num_tokens for row in alone.rows]
    for mine, its in zip(together.end_together(), alone.end(), strict=True):
        assert as_values(mine) == as_values(its)


@settings(max_examples=40, deadline=None)
@given(names(min_size=1), st.data())
def test_only_answers_are_judged_together_as_each_by_itself(chosen, data):
    tokenizer = scripted.ambiguous_tokenizer()
    # Without this one, rows of more unequal length would be split.
    limits = [{"task_limits": {"tokens": 3}}, {}, {}]
    both = [
        Played(tokenizer, chosen, versions=lambda call: 4, columns=limits, max_turns=1)
        for _ in range(2)
    ]
    together, alone = both
    call = together.call(together.rows)
    for row in alone.rows:
        row.answer(alone.generator.generate(row.question()))
    # In any parts, as if several threads had asked the environment.
    order = data.draw(st.permutations(range(len(chosen))))
    ends = sorted(data.draw(st.sets(st.integers(1, len(chosen)))) | {len(chosen)})
    for begin, end in zip([0, *ends], ends, strict=False):
        part = [together.rows[place].conversation for place in order[begin:end]]
        begun = data.draw(st.sets(st.sampled_from(part)))
        seeds = {one.begin() for one in begun}
        assert None not in seeds
        if len(part) == 1 and data.draw(st.booleans()):
            assert part[0].question().size == 1  # that takes it out of the batch
        logs, metadata = [one.log for one in part], [one.metadata for one in part]
        judge_all(part, together.judge.step(logs, metadata))
        # Once, with what the verdict made of it, and only what has begun.
        closed = {one: one.take_ended() for one in part}
        assert closed == {one: [one.metadata] if one in begun else [] for one in part}
        assert not any(one.take_ended() for one in part)
    for mine, its in zip(together.rows, alone.rows, strict=True):
        one = its.conversation
        one.begin()
        one.judge(alone.judge.step([one.log], [one.metadata]))
        assert not mine.conversation.needs_verdict
        assert mine.conversation.num_tokens == one.num_tokens
    assert len(call.rows) == len(chosen)
    groups = [
        [row.conversation.played() for row in played.rows[half]]
        for played in both
        for half in (slice(0, 1), slice(1, None))
    ]
    found = [
        dict(
            played.engine.finish([group for group in groups[at : at + 2] if group]).rows
        )
        for at, played in ((0, together), (2, alone))
    ]
    assert as_values(found[0]) == as_values(found[1])


def test_rows_of_one_call_stay_together_unless_most_of_it_is_padding():
    def of_length(call, row, seed):
        return [3] * (30 if is_ragged and row == 0 else 2)

    tokenizer = scripted.ambiguous_tokenizer()
    for is_ragged in (False, True):
        chosen = [(0, 0, sample, 0) for sample in range(8)]
        played = Played(tokenizer, chosen, max_turns=1, answers=of_length)
        played.call(played.rows)
        conversations = [row.conversation for row in played.rows]
        logs = [one.log for one in conversations]
        verdict = played.judge.step(logs, [one.metadata for one in conversations])
        judge_all(conversations, verdict)
        rows = [one.played() for one in conversations]
        assert len({id(row.batch) for row in rows}) == (8 if is_ragged else 1)
        if not is_ragged:
            # The generator's columns, which may be memory of the object store, are
            # not held.
            width = int(rows[0].batch.input_lengths.max())
            assert rows[0].batch.input_ids.untyped_storage().nbytes() == 8 * 8 * width
        assert [row.alone().size for row in rows] == [1] * 8


def test_a_result_is_a_copy_of_the_rows():
    played = Played(scripted.ambiguous_tokenizer(), [(0, 0, 0, 0)], max_turns=1)
    played.call(played.rows)
    [row] = played.end()
    before = as_values(row)
    result = played.engine.finish([[played.rows[0].conversation.played()]])
    for name in ("rewards", "input_ids", "outcome"):
        result.rows[name].fill_(77)
    result.rows["texts"][0] = "changed"
    assert as_values(played.rows[0].conversation.played().alone()) == before


def test_limits_stop_strings_and_columns_are_those_of_each_row():
    columns = [
        {"task_limits": {"tokens": 2}, "until": 9},
        {"stop_strings": ["b"], "until": 9},
        {"until": 2},
    ]
    chosen = [(0, prompt, sample, 0) for prompt in range(3) for sample in range(3)]
    tokenizer = scripted.ambiguous_tokenizer()
    together = Played(tokenizer, chosen, columns=columns)
    call = together.call(together.rows)
    [asked] = together.generator.calls
    # Those unlike the first prompt come after the batch.
    order = [row.conversation for row in call.rows]
    stops = {id(row.conversation) for row in together.rows[3:6]}
    assert [found for one, found in zip(order, asked["stop_strings"], strict=True)] == [
        ["b"] if id(one) in stops else None for one in order
    ]
    alone = Played(tokenizer, chosen, columns=columns)
    alone.generator.calls.append({})
    for row in alone.rows:
        alone.generator.versions = lambda call: 0
        row.answer(alone.generator.generate(row.question()))
    alone.generator.versions = together.generator.versions = lambda call: 3
    ended = together.end()
    for mine, its in zip(ended, alone.end(), strict=True):
        assert as_values(mine) == as_values(its)
    assert [int(row.generation_lengths) <= 2 for row in ended[:3]] == [True] * 3
    assert [len(row.metadata[0].get("task_limits", ())) for row in ended] == [
        *[4] * 3,
        *[0] * 6,
    ]


def test_rows_of_later_turns_and_of_others_are_asked_for_one_by_one():
    chosen = [(0, 1, sample, 0) for sample in range(4)]
    played = Played(scripted.ambiguous_tokenizer(), chosen)
    old, *new = played.rows
    call = played.call([old])
    # A batch of one row would only cost more.
    assert call.rows == [old]
    old.conversation.begin()
    one = old.conversation
    one.judge(played.judge.step([one.log], [one.metadata]))
    assert one.goes_on
    call = played.call([old, *new])
    assert call.rows == [*new, old]
    assert [row.conversation.needs_verdict for row in played.rows] == [True] * 4
    assert not one.goes_on
    assert all(row.conversation.goes_on for row in new)


def test_a_call_that_fails_leaves_conversations_new():
    chosen = [(0, 0, sample, 0) for sample in range(3)]
    played = Played(scripted.ambiguous_tokenizer(), chosen)
    questions = CallRows(played.rows).questions(played.pad)
    assert all(row.conversation.is_new for row in played.rows)
    assert all(row.conversation.take_ended() == [] for row in played.rows)
    again = CallRows(played.rows).questions(played.pad)
    assert as_values(dict(again)) == as_values(dict(questions))
    # One that is given up is a row that failed, and the others can be sampled.
    failed, *others = played.rows
    failed.conversation.fail(RuntimeError("gone"))
    assert not failed.conversation.goes_on
    played.call(others)
    assert all(row.conversation.needs_verdict for row in others)


def test_rows_do_not_keep_the_columns_of_the_call_alive():
    chosen = [(0, 0, sample, 0) for sample in range(5)]
    played = Played(scripted.ambiguous_tokenizer(), chosen)
    first = FirstTurns([row.conversation for row in played.rows])
    output = played.generator.generate(first.questions())
    width = output["output_ids"].shape[1]
    first.answer(BatchedDataDict(output))
    for row, length in zip(
        played.rows, output["unpadded_sequence_lengths"].tolist(), strict=True
    ):
        tokens = row.conversation.played().batch.input_ids
        assert tokens.shape == (1, length)
        assert tokens.untyped_storage().nbytes() == 8 * length
    assert len(set(output["unpadded_sequence_lengths"].tolist())) > 1
    assert width > 1
