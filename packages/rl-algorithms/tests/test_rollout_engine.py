from __future__ import annotations

import cProfile
import math

import numpy as np
import pytest
import torch

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.errors import DataError, PromptTooLongError, RolloutError
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.engine import RolloutEngine
from rl_algorithms.rollout.result import TRAJECTORIES, Outcome
from rl_algorithms.seeds import row_seeds
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import WorkerDiedError
from rl_distributed.metrics.values import reduce_metrics
from rl_distributed.timing.timer import Timer
from rl_envs.errors import EnvironmentContractError, RewardValueError
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer
from rl_models.tokens.tokenizer import pad_token_id

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 <>:?=+\n"


def make_tokenizer(template=None):
    return build_tokenizer(
        TokenizerBuildConfig(characters=ALPHABET, chat_template=template)
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Scripted:
    """A generator that emits scripted text and records its inputs.

    `script(call, row, seed)` returns text; `$` at its end is the end of sequence.
    """

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script = tokenizer, script
        self.calls = []

    def generate(self, data, greedy=False, *, sampling=None):
        call = len(self.calls)
        self.calls.append(data)
        ids, lengths = data["input_ids"], data["input_lengths"]
        tails, truncated = [], []
        for row, seed in enumerate(data["seeds"].tolist()):
            text = self.script(call, row, seed)
            tail = self.tokenizer(text.rstrip("$"))["input_ids"]
            ended = text.endswith("$")
            tails.append(tail + [self.tokenizer.eos_token_id] * ended)
            truncated.append(not ended)
        sampled = torch.tensor([len(tail) for tail in tails])
        total = lengths + sampled
        out = torch.full((len(tails), int(total.max())), pad_token_id(self.tokenizer))
        logprobs = torch.zeros(out.shape)
        for row, tail in enumerate(tails):
            start, end = int(lengths[row]), int(total[row])
            out[row, :start] = ids[row, :start]
            out[row, start:end] = torch.tensor(tail, dtype=torch.int64)
            logprobs[row, start:end] = -torch.arange(1.0, len(tail) + 1) / 8
        return BatchedDataDict(
            {
                "output_ids": out,
                "generation_lengths": sampled,
                "unpadded_sequence_lengths": total,
                "logprobs": logprobs,
                "truncated": torch.tensor(truncated),
                "weight_version": torch.full((len(tails),), 5 + call),
            }
        )


class Judge(EnvironmentInterface):
    """Calls `judge(row, log, metadata)` -> (reward, done, observation, metadata)."""

    def __init__(self, judge):
        self.judge, self.seen = judge, []

    def step(self, message_log_batch, metadata):
        self.seen.append([list(log) for log in message_log_batch])
        answers = [
            self.judge(row, log, info)
            for row, (log, info) in enumerate(
                zip(message_log_batch, metadata, strict=True)
            )
        ]
        rewards, done, said, infos = zip(*answers, strict=True)
        return EnvironmentReturn(
            [{"role": "tool", "content": text} for text in said],
            list(infos),
            [None] * len(answers),
            torch.tensor(rewards),
            torch.tensor(done),
            [log[-1]["content"] for log in message_log_batch],
        )


def exact(row, log, info):
    return float(log[-1]["content"] == info.get("answer")), True, "", info


def make_batch(tokenizer, rows=None):
    rows = rows or [{"prompt": "1+1=", "answer": "2"}, {"prompt": "3=", "answer": "3"}]
    return rl_collate_fn(
        process_prompts(rows, tokenizer)[:], pad_token_id=tokenizer.pad_token_id
    )


def texts(tokenizer, result, mask=None):
    rows = result.rows
    return [
        tokenizer.decode(ids[:length][keep[:length].bool()].tolist())
        for ids, length, keep in zip(
            rows["input_ids"],
            rows["input_lengths"].tolist(),
            rows["token_mask"] if mask is None else torch.ones_like(rows["input_ids"]),
            strict=True,
        )
    ]


def test_rows_are_padded_with_the_end_of_text_if_there_is_no_padding_token():
    padless = make_tokenizer()
    padless.pad_token = None
    generator = Scripted(padless, lambda call, row, seed: "2$")
    # The second turn of one row widens the columns of all rows.
    judge = Judge(lambda row, log, info: (1.0, row != 1 or len(log) > 2, "more", info))
    prompts = process_prompts([{"prompt": "1+1="}, {"prompt": "3="}], padless)[:]
    batch = rl_collate_fn(prompts, pad_token_id=pad_token_id(padless))
    config = RolloutConfig(max_turns=2)
    rows = RolloutEngine(generator, judge, padless, config).run(batch).rows
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    is_padding = torch.arange(ids.shape[1]) >= lengths[:, None]
    assert is_padding.any(1).tolist() == [True, False]
    assert set(ids[is_padding].tolist()) == {padless.eos_token_id}
    assert padless.eos_token_id != 0


def test_single_turn(tokenizer):
    says = ["2$", "33$", "3$", "1"]
    generator = Scripted(tokenizer, lambda call, row, seed: says[row])
    environment = Judge(exact)
    result = RolloutEngine(generator, environment, tokenizer).run(
        make_batch(tokenizer), num_generations=2, seed=3, step=4, first_prompt_index=9
    )
    rows = result.rows
    TRAJECTORIES.check(rows)
    assert texts(tokenizer, result) == ["2<eos>", "33<eos>", "3<eos>", "1"]
    assert texts(tokenizer, result, "all")[1] == "1+1=33<eos>"
    assert rows["texts"] == ["2", "33", "3", "1"]
    assert rows["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert rows["group_index"].tolist() == [0, 0, 1, 1]
    assert rows["truncated"].tolist() == [False, False, False, True]
    assert rows["outcome"].tolist() == [0, 0, 0, Outcome.TRUNCATED]
    assert rows["sample_mask"].tolist() == [1.0] * 4
    assert rows["input_lengths"].tolist() == [6, 7, 4, 3]
    assert rows["generation_lengths"].tolist() == [2, 3, 2, 1]
    assert rows["weight_version"].tolist() == [5] * 4
    assert rows["generation_logprobs"][1].tolist() == [0] * 4 + [-1 / 8, -2 / 8, -3 / 8]
    assert rows["generation_logprobs"][3].tolist() == [0, 0, -1 / 8, 0, 0, 0, 0]
    (call,) = generator.calls
    assert (
        call["seeds"].tolist()
        == row_seeds(
            3, 4, torch.tensor([9, 9, 10, 10]).numpy(), torch.tensor([0, 1] * 2).numpy()
        ).tolist()
    )
    assert environment.seen[0][1] == [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "33"},
    ]
    sample = result.samples[2]
    assert (sample.prompt, sample.response, sample.answer) == ("3=", "3", "3")
    assert sample.extra_env_info["answer"] == "3"


def test_a_prompt_that_does_not_count_is_not_trained_on(tokenizer):
    batch = make_batch(tokenizer)
    batch["loss_multiplier"] = torch.tensor([1.0, 0.0])
    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    result = RolloutEngine(generator, Judge(exact), tokenizer).run(
        batch, num_generations=2
    )
    assert result.rows["sample_mask"].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_metrics(tokenizer):
    says = ["2$", "33$", "3$", "1"]
    engine = RolloutEngine(
        Scripted(tokenizer, lambda call, row, seed: says[row]), Judge(exact), tokenizer
    )
    metrics = engine.run(make_batch(tokenizer), num_generations=2).metrics
    assert float(metrics["reward"]) == 0.5
    assert float(metrics["truncation_rate"]) == 0.25
    assert float(metrics["natural_termination_rate"]) == 0.75
    assert float(metrics["mean_gen_tokens_per_sample"]) == 2.0
    assert float(metrics["max_gen_tokens_per_sample"]) == 3.0
    assert float(metrics["mean_prompt_length"]) == 3.0
    assert float(metrics["mean_env_tokens_per_sample"]) == 0.0
    assert float(metrics["weight_version_max"]) == 5.0
    both = reduce_metrics([metrics, metrics])
    assert float(both["reward"]) == 0.5


def test_equal_prompts_keep_their_groups_and_differ_in_seeds(tokenizer):
    rows = [{"prompt": "1", "answer": "2"}] * 2
    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    result = RolloutEngine(generator, Judge(exact), tokenizer).run(
        make_batch(tokenizer, rows), num_generations=2
    )
    assert result.rows["group_index"].tolist() == [0, 0, 1, 1]
    assert len(set(generator.calls[0]["seeds"].tolist())) == 4


def test_a_failed_environment_is_not_a_reward_of_zero(tokenizer):
    def judge(row, log, info):
        return (math.nan if row == 1 else 1.0), True, "", info

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    result = RolloutEngine(generator, Judge(judge), tokenizer).run(
        make_batch(tokenizer), num_generations=2
    )
    assert result.rows["sample_mask"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert result.rows["outcome"].tolist() == [0, Outcome.ENVIRONMENT_ERROR, 0, 0]
    assert result.rows["rewards"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert float(result.metrics["reward"]) == 1.0
    assert float(result.metrics["environment_error_rate"]) == 0.25
    assert not Outcome.ENVIRONMENT_ERROR.is_trainable


class Failing(EnvironmentInterface):
    def __init__(self, error):
        self.error = error

    def step(self, message_log_batch, metadata):
        raise self.error


def test_environments_that_raise(tokenizer):
    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    drop = RolloutConfig(on_environment_error="drop")
    batch = make_batch(tokenizer)
    for error, config, expected, message in (
        (KeyError("oh"), None, KeyError, "oh"),
        (KeyError("oh"), drop, RolloutError, "failed for 2 of 2 rows.*KeyError: 'oh'"),
        (WorkerDiedError("gone"), drop, RolloutError, "WorkerDiedError: gone"),
        (RewardValueError("nan"), drop, RewardValueError, "nan"),
    ):
        engine = RolloutEngine(generator, Failing(error), tokenizer, config)
        with pytest.raises(expected, match=message):
            engine.run(batch)


def test_too_many_failed_rows_end_the_run(tokenizer):
    def judge(row, log, info):
        return (math.nan if row < 2 else 1.0), True, "", info

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    config = RolloutConfig(max_failed_rate=0.4)
    with pytest.raises(RolloutError, match=r"2 of 4 rows.*max_failed_rate=0\.4"):
        RolloutEngine(generator, Judge(judge), tokenizer, config).run(
            make_batch(tokenizer), num_generations=2
        )


def test_wrong_shapes_name_the_environment(tokenizer):
    class Short(Judge):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            return answer._replace(rewards=answer.rewards[:1])

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    with pytest.raises(RolloutError, match=r"Short.step was given 2 .* 1 rewards"):
        RolloutEngine(generator, Short(exact), tokenizer).run(make_batch(tokenizer))


@pytest.mark.parametrize("form", [list, np.array])
def test_rewards_need_not_be_tensors(tokenizer, form):
    class Plain(Judge):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            rewards = {"reward/right": form(answer.rewards.tolist())}
            ends = form(answer.terminateds.tolist())
            return answer._replace(rewards=rewards, terminateds=ends)

        def score_groups(self, message_logs, metadata):
            return [{"reward/rank": form([0.5] * len(logs))} for logs in message_logs]

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    result = RolloutEngine(generator, Plain(exact), tokenizer).run(
        make_batch(tokenizer)
    )
    assert result.rows["rewards"].tolist() == [1.5, 0.5]
    assert result.rows["reward/right"].tolist() == [1.0, 0.0]
    assert result.rows["reward/rank"].tolist() == [0.5, 0.5]


def test_rewards_that_are_no_numbers_name_the_rule(tokenizer):
    class Words(Judge):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            return answer._replace(rewards=["good", "bad"])

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    with pytest.raises(EnvironmentContractError, match="rewards must be a tensor, a"):
        RolloutEngine(generator, Words(exact), tokenizer).run(make_batch(tokenizer))


def test_named_rewards(tokenizer):
    class Named(Judge):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            right = answer.rewards
            return answer._replace(
                rewards={"reward/right": right, "reward/short": torch.ones(2) / 2}
            )

        def global_post_process_and_metrics(self, batch):
            return batch, {"rows": len(batch["rewards"])}

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    result = RolloutEngine(generator, Named(exact), tokenizer).run(
        make_batch(tokenizer)
    )
    assert result.rows["rewards"].tolist() == [1.5, 0.5]
    assert result.rows["reward/right"].tolist() == [1.0, 0.0]
    assert float(result.metrics["env/rows"]) == 2.0


def test_a_reward_of_a_later_turn_does_not_apply_to_rows_that_ended(tokenizer):
    class Late(Judge):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            rewards = {"reward/each": torch.ones(len(metadata))}
            if len(self.seen) > 1:
                rewards["reward/late"] = torch.ones(len(metadata))
            return answer._replace(rewards=rewards)

    def judge(row, log, info):
        return 0.0, len(log) > 2 or info["answer"] == "2", "more", info

    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    config = RolloutConfig(max_turns=2)
    result = RolloutEngine(generator, Late(judge), tokenizer, config).run(
        make_batch(tokenizer)
    )
    assert result.rows["reward/each"].tolist() == [1.0, 2.0]
    early, late = result.rows["reward/late"].tolist()
    assert math.isnan(early)
    assert late == 1.0


def guessing(row, log, info):
    """Reply higher until the answer is named; half a point per turn."""
    right = log[-1]["content"] == info["answer"]
    return 0.5, right, "more", {**info, "tries": info.get("tries", 0) + 1}


def test_several_turns_with_plain_text(tokenizer):
    rows = [{"prompt": "a:", "answer": "1"}, {"prompt": "bcd:", "answer": "3"}]
    script = [["1$", "1$"], ["22$"], ["3$"]]
    generator = Scripted(tokenizer, lambda call, row, seed: script[call][row])
    environment = Judge(guessing)
    config = RolloutConfig(max_turns=5)
    result = RolloutEngine(generator, environment, tokenizer, config).run(
        make_batch(tokenizer, rows), seed=1
    )
    assert texts(tokenizer, result, "all") == [
        "a:1<eos>",
        "bcd:1<eos>more22<eos>more3<eos>",
    ]
    assert texts(tokenizer, result) == ["1<eos>", "1<eos>22<eos>3<eos>"]
    assert result.rows["rewards"].tolist() == [0.5, 1.5]
    assert result.rows["weight_version"].tolist() == [5, 5]
    assert result.rows["generation_lengths"].tolist() == [2, 7]
    assert [len(calls) for calls in environment.seen] == [2, 1, 1]
    assert [m["role"] for m in result.message_logs[1]] == [
        "user",
        *["assistant", "tool"] * 2,
        "assistant",
    ]
    sampled = result.rows["token_mask"].bool()
    logprobs = result.rows["generation_logprobs"]
    assert bool((logprobs[sampled] < 0).all())
    assert not logprobs[~sampled].any()
    assert float(result.metrics["avg_turns_per_sample"]) == 2.0
    assert float(result.metrics["mean_env_tokens_per_sample"]) == 4.0
    seeds = [call["seeds"].tolist()[-1] for call in generator.calls]
    assert len(set(seeds)) == 3
    # The continuing row keeps its own noise.
    own = row_seeds(1, 0, torch.tensor([1]).numpy(), torch.tensor([0]).numpy(), turn=1)
    assert generator.calls[1]["seeds"].tolist() == own.tolist()


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_generator_may_return_other_dtypes(tokenizer, num_prompts):
    class Narrow(Scripted):
        def generate(self, data, greedy=False, *, sampling=None):
            output = super().generate(data, greedy, sampling=sampling)
            output["logprobs"] = output["logprobs"].to(torch.bfloat16)
            for name in ("output_ids", "unpadded_sequence_lengths", "weight_version"):
                output[name] = output[name].to(torch.int32)
            return output

    def played(kind):
        generator = kind(tokenizer, lambda call, row, seed: "11$")
        engine = RolloutEngine(generator, Judge(guessing), tokenizer, RolloutConfig())
        rows = [{"prompt": "a:", "answer": "1"}] * num_prompts
        return engine.run(make_batch(tokenizer, rows), seed=1).rows

    narrow, usual = played(Narrow), played(Scripted)
    for name, column in usual.items():
        if isinstance(column, torch.Tensor):
            assert narrow[name].dtype == column.dtype, name
            torch.testing.assert_close(narrow[name], column, rtol=0.01, atol=0.0)


def test_observations_follow_the_chat_template():
    chat = make_tokenizer(TEMPLATE)
    script = [["1$"], ["2"], ["3$"]]
    generator = Scripted(chat, lambda call, row, seed: script[call][row])
    config = RolloutConfig(max_turns=3)
    result = RolloutEngine(generator, Judge(guessing), chat, config).run(
        make_batch(chat, [{"prompt": "x", "answer": "1000"}])
    )
    (text,) = texts(chat, result, "all")
    # Each turn ends once: with the sampled token, or with the template's own.
    assert text == "<u>x\n<a>1<eos>\n<t>more\n<a>2<eos>\n<t>more\n<a>3<eos>"
    assert texts(chat, result) == ["1<eos>23<eos>"], "an end is not learned from there"


class TestCutAnswers:
    """A cut-off answer (`max_new_tokens`) continues unless the environment ends it."""

    SCRIPT = (["1"], ["2"], ["3$"])

    def run(self, judge, tokenizer=None, script=SCRIPT, **config):
        chat = tokenizer or make_tokenizer(TEMPLATE)
        generator = Scripted(chat, lambda call, row, seed: script[call][row])
        environment = Judge(judge)
        settings = RolloutConfig(**{"max_turns": 3, **config})
        result = RolloutEngine(generator, environment, chat, settings).run(
            make_batch(chat, [{"prompt": "x", "answer": "1000"}])
        )
        return result, environment, chat

    def test_the_environment_is_told_and_goes_on(self):
        told = []

        def judge(row, log, info):
            told.append(log[-1].get("truncated", False))
            return 1.0, len(told) == 3, "more", info

        result, _, chat = self.run(judge)
        assert told == [True, True, False]
        assert result.rows["num_turns"].tolist() == [3]
        assert result.rows["rewards"].tolist() == [3.0]
        assert result.rows["outcome"].tolist() == [Outcome.OK]
        assert result.rows["truncated"].tolist() == [False]
        assert float(result.metrics["cut_answer_rate"]) == pytest.approx(2 / 3)
        assert float(result.metrics["truncation_rate"]) == 0.0
        assert texts(chat, result) == ["123<eos>"]

    def test_the_environment_may_end_it(self):
        def judge(row, log, info):
            return 1.0, "truncated" in log[-1], "more", info

        result, environment, _ = self.run(judge)
        assert len(environment.seen) == 1
        assert result.rows["outcome"].tolist() == [Outcome.TRUNCATED]
        assert result.rows["truncated"].tolist() == [True]

    def test_the_last_answer_counts(self):
        result, *_ = self.run(guessing, script=(["1$"], ["2"]), max_turns=2)
        assert result.rows["truncated"].tolist() == [True]
        assert result.rows["outcome"].tolist() == [Outcome.TRUNCATED]
        assert float(result.metrics["max_turns_reached_rate"]) == 1.0

    def test_without_room_for_another_answer_it_ends(self):
        # The prompt has 8 tokens; an answer and the reply to it have 14.
        result, environment, _ = self.run(
            guessing, max_total_sequence_length=30, min_answer_room=2
        )
        assert len(environment.seen) == 2
        assert result.rows["outcome"].tolist() == [Outcome.TRUNCATED]
        assert result.rows["truncated"].tolist() == [True]

    def test_templates_do_not_see_the_note(self):
        note = "{{ m['content'] }}{% if 'truncated' in m %}zz{% endif %}"
        template = TEMPLATE.replace("{{ m['content'] }}", note)
        result, _, chat = self.run(guessing, make_tokenizer(template))
        (text,) = texts(chat, result, "all")
        assert "z" not in text
        assert result.message_logs[0][1]["truncated"] is True


def test_turn_limit_and_length_limit(tokenizer):
    rows = [{"prompt": "a:", "answer": "no"}, {"prompt": "abcd:", "answer": "no"}]
    generator = Scripted(tokenizer, lambda call, row, seed: "1$")
    config = RolloutConfig(max_turns=2, max_total_sequence_length=10)
    result = RolloutEngine(generator, Judge(guessing), tokenizer, config).run(
        make_batch(tokenizer, rows)
    )
    assert result.rows["truncated"].tolist() == [False, True]
    assert result.rows["input_lengths"].tolist() == [10, 10]
    assert result.rows["input_ids"].shape[1] == 10
    assert result.rows["rewards"].tolist() == [1.0, 0.5]
    assert float(result.metrics["max_turns_reached_rate"]) == 0.5


def test_answers_beyond_the_context_are_cut(tokenizer):
    generator = Scripted(tokenizer, lambda call, row, seed: "12345678$")
    config = RolloutConfig(max_total_sequence_length=6)
    result = RolloutEngine(generator, Judge(exact), tokenizer, config).run(
        make_batch(tokenizer)
    )
    assert texts(tokenizer, result) == ["12", "1234"]
    assert result.rows["truncated"].tolist() == [True, True]


def test_bad_input(tokenizer):
    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    config = RolloutConfig(max_total_sequence_length=4)
    engine = RolloutEngine(generator, Judge(exact), tokenizer, config)
    with pytest.raises(PromptTooLongError, match="row 0 has 4 tokens"):
        engine.run(make_batch(tokenizer))
    with pytest.raises(DataError, match="lacks input_ids, input_lengths"):
        engine.run(BatchedDataDict({"message_log": []}))
    batch = make_batch(tokenizer)
    batch["input_ids"] = batch["input_ids"].float()
    with pytest.raises(DataError, match="column 'input_ids' of the prompts must be"):
        engine.run(batch)
    with pytest.raises(DataError, match="num_generations must be at least 1"):
        engine.run(make_batch(tokenizer), num_generations=0)
    with pytest.raises(DataError, match="at least one prompt: got an empty batch"):
        engine.run(make_batch(tokenizer).slice(0, 0))


class Replay:
    """Replays recorded answers at no cost."""

    def __init__(self, recorded):
        self.recorded = recorded

    def __call__(self, *args, **kwargs):
        return self.recorded


def calls_of(function):
    """Count the Python calls of a function: a cost independent of the machine."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())


def test_overhead_grows_with_rows_and_little(tokenizer):
    """Beyond generation and environment; `benchmarks.overhead` measures the time."""

    def cost(num_prompts):
        rows = [{"prompt": f"{i} {i} {i}:", "answer": "2"} for i in range(num_prompts)]
        batch = make_batch(tokenizer, rows)
        generator = Scripted(tokenizer, lambda call, row, seed: "123456789012$")
        environment = Judge(exact)
        engine = RolloutEngine(generator, environment, tokenizer)
        result = engine.run(batch, num_generations=8)
        generator.generate = Replay(Scripted.generate(generator, generator.calls[0]))
        environment.step = Replay(
            Judge(exact).step(result.message_logs, result.extra_env_info)
        )
        return calls_of(lambda: engine.run(batch, num_generations=8))

    few, many = cost(8), cost(64)
    assert few < 2000
    # 3.9 per row; this finds one extra call in a loop over its 17 tokens.
    assert (many - few) / (56 * 8) < 8


def test_spans_are_timed(tokenizer):
    timer = Timer()
    generator = Scripted(tokenizer, lambda call, row, seed: "2$")
    RolloutEngine(generator, Judge(exact), tokenizer).run(
        make_batch(tokenizer), timer=timer
    )
    assert len(timer.get_elapsed("generation")) == 1
    assert len(timer.get_elapsed("environment")) == 1
