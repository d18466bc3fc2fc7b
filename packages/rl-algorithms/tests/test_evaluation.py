"""Evaluations with a tiny model on Ray."""

from __future__ import annotations

import json

import pytest
import torch

import rl_algorithms as rl
from rl_algorithms.data import DataConfig
from rl_algorithms.errors import DataError
from rl_algorithms.evaluation import EvalConfig, evaluate, find_target
from rl_algorithms.evaluation.result import DatasetEvaluation
from rl_algorithms.evaluation.target import EvaluationTarget
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError, UserError
from rl_envs import FunctionalRewardWrapper
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_models import GenerationConfig, GenerationPolicy
from rl_models.generation.rows import check_rows

ROWS = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)]
SETTINGS = {"max_new_tokens": 3, "num_generations": 4, "seed": 5}


def reward(prompt, response):
    return float("1" in response)


SCORER = FunctionalRewardWrapper(reward)


@pytest.fixture(scope="module")
def generation(ray_cluster, tiny_model):
    cluster = RayVirtualCluster([1], use_gpus=False)
    policy = GenerationPolicy(
        cluster, GenerationConfig(max_new_tokens=3), model_name=tiny_model
    )
    yield policy
    policy.shutdown()
    cluster.shutdown()


class LastDigit(EnvironmentInterface):
    """Takes the last character as the answer; 7 is correct."""

    def step(self, message_log_batch, metadata):
        answers = [log[-1]["content"][-1:] or None for log in message_log_batch]
        size = len(answers)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=torch.tensor([float(answer == "7") for answer in answers]),
            terminateds=torch.ones(size, dtype=torch.bool),
            answers=answers,
        )


class Talkative:
    """Emits two tokens per turn; rejects, as backends do, prompts too long for the
    context."""

    weight_version = 0

    def __init__(self, context, limit):
        self.context, self.limit, self.num_calls = context, limit, 0

    def generate(self, data, greedy=False, *, sampling=None):
        self.num_calls += 1
        ids, lengths = data["input_ids"], data["input_lengths"]
        check_rows(ids, lengths.numpy(), self.limit, self.context)
        out = torch.nn.functional.pad(ids, (0, 2))
        for row, length in enumerate(lengths.tolist()):
            out[row, length : length + 2] = ids[row, 0]
        size = len(lengths)
        return BatchedDataDict(
            {
                "output_ids": out,
                "generation_lengths": torch.full((size,), 2),
                "unpadded_sequence_lengths": lengths + 2,
                "logprobs": torch.zeros(out.shape),
                "truncated": torch.ones(size, dtype=torch.bool),
                "weight_version": torch.zeros(size, dtype=torch.int64),
            }
        )


class Endless(LastDigit):
    """Always asks for another answer."""

    def step(self, message_log_batch, metadata):
        judged = super().step(message_log_batch, metadata)
        size = len(metadata)
        more = [{"role": "user", "content": "+1="}] * size
        done = torch.zeros(size, dtype=torch.bool)
        return judged._replace(observations=more, terminateds=done)


def test_rows_that_nothing_can_judge_are_named(tiny_model):
    class Particular(LastDigit):
        def unusable_rows(self, metadata):
            return {len(metadata) - 1: "the last one"}

    generation = Talkative(64, 4)
    with pytest.raises(DataError, match=r"1 of 9 rows .* row 8: the last one"):
        evaluate(
            tiny_model,
            ROWS,
            environment=Particular(),
            generation=generation,
            max_new_tokens=4,
        )
    assert generation.num_calls == 0


@pytest.mark.parametrize("context", [None, 32])
def test_conversations_end_where_the_context_does(tiny_model, context):
    """The model's context has 64 tokens; a turn takes five, an answer up to four."""
    generation = Talkative(context or 64, 4)
    result = evaluate(
        tiny_model,
        ROWS[:2],
        environment=Endless(),
        generation=generation,
        max_new_tokens=4,
        max_rollout_turns=50,
        **({} if context is None else {"max_context_length": context}),
    )
    assert result.metrics["truncation_rate"] == 1.0
    # The prompt has 4 tokens: 4 + 5 n + 4 must fit.
    assert generation.num_calls == ((context or 64) - 8) // 5 + 1


@pytest.mark.usefixtures("ray_cluster")
class TestEvaluate:
    def test_measures_a_model_folder(self, tiny_model, tmp_path):
        out = tmp_path / "deep" / "result.json"
        result = evaluate(tiny_model, ROWS, reward, output=out, **SETTINGS)
        samples = result.samples
        assert [s["idx"] for s in samples] == [i for i in range(9) for _ in range(4)]
        right = [s["correct"] for s in samples]
        assert right == ["1" in s["response"] for s in samples]
        metrics = result.metrics
        assert metrics["pass@1"] == pytest.approx(sum(right) / 36)
        assert metrics["pass@1"] == pytest.approx(metrics["reward"])
        by_prompt = [any(right[i : i + 4]) for i in range(0, 36, 4)]
        assert metrics["pass@4"] == pytest.approx(sum(by_prompt) / 9)
        assert metrics["pass@1"] <= metrics["pass@2"] <= metrics["pass@4"]
        assert metrics["reward_low"] < metrics["reward"] < metrics["reward_high"]
        saved = json.loads(out.read_text())
        assert saved["datasets"]["dataset"]["metrics"]["pass@4"] == metrics["pass@4"]
        assert saved["samples"] == samples
        assert EvalConfig.from_dict(saved["config"]).seed == 5

    def test_depends_on_the_seed_only(self, generation, tiny_model):
        def run(**settings):
            chosen = {**SETTINGS, **settings}
            found = evaluate(
                tiny_model, ROWS, environment=SCORER, generation=generation, **chosen
            )
            return [s["response"] for s in found.samples]

        first = run()
        assert run(batch_size=2) == first
        assert run(seed=6) != first
        assert run(max_samples=2) == first[:8]

    def test_datasets_are_measured_one_by_one(self, generation, tiny_model, tmp_path):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in ROWS[:4]))
        result = evaluate(
            tiny_model,
            datasets={"file": str(file), "list": ROWS[4:]},
            environment=LastDigit(),
            generation=generation,
            **SETTINGS,
        )
        assert {n: d.num_prompts for n, d in result.datasets.items()} == {
            "file": 4,
            "list": 5,
        }
        assert 0 <= result.metrics["list/cons@4"] <= 1
        answers = {s["answer"] for s in result.samples}
        assert all(answer is None or len(answer) == 1 for answer in answers)

    def test_one_answer_is_greedy(self, generation, tiny_model):
        def run(seed):
            return evaluate(
                tiny_model,
                ROWS,
                environment=SCORER,
                generation=generation,
                max_new_tokens=3,
                seed=seed,
            )

        one, other = run(1), run(2)
        assert one.samples == other.samples
        assert set(one.metrics) >= {"pass@1", "cons@1", "truncation_rate"}

    def test_a_run_brings_its_settings(self, tiny_model, tmp_path):
        file = tmp_path / "held_out.jsonl"
        file.write_text("\n".join(json.dumps({**row, "answer": "1"}) for row in ROWS))
        rl.train(
            tiny_model,
            [{"prompt": "1+1=", "answer": "2"}] * 8,
            algorithm="sft",
            max_num_steps=2,
            save_period=1,
            train_global_batch_size=8,
            max_total_sequence_length=16,
            max_new_tokens=3,
            data={"validation": str(file)},
            environment=SCORER,
            output_dir=str(tmp_path / "run"),
        )
        result = evaluate(tmp_path / "run", environment=SCORER)
        assert result.datasets["validation"].num_prompts == 9
        assert all(s["num_tokens"] <= 3 for s in result.samples)
        checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
        assert find_target(checkpoint).model == str(checkpoint / "policy" / "weights")
        newest = find_target(tmp_path / "run").model
        assert "step_2" in newest


def test_keys_of_training_are_not_taken_from_a_run():
    data = {"train": "a.jsonl", "shuffle": False, "drop_last": True}
    given = {**data, "split_validation_size": 5, "pass_rate_filter": {"num_visits": 3}}
    settings = EvaluationTarget("m", {"data": {**given, "input_key": "q"}}).settings()
    assert EvalConfig.from_dict(settings).data == DataConfig(input_key="q")


def samples_of(rewards):
    return [
        {
            "reward": value,
            "correct": value == 1.0,
            "answer": str(value),
            "truncated": False,
            "num_tokens": 2,
        }
        for value in rewards
    ]


def test_what_was_not_scored_is_not_right_and_has_no_reward():
    found = DatasetEvaluation.of("d", samples_of([1.0, None, 0.0, 1.0]), 2, [1, 2])
    assert found.metrics["pass@1"] == 0.5
    assert found.metrics["pass@2"] == 1.0
    assert found.metrics["reward"] == pytest.approx((1.0 + 0.5) / 2)
    assert found.metrics["unscored_rate"] == 0.25


def test_a_result_that_cannot_be_written_is_named_before_anything_starts(
    tiny_model, tmp_path
):
    (tmp_path / "file").write_text("")
    for output, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "result.json", "cannot be made"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(tiny_model, ROWS, reward, output=output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "rewards answers"),
        ({"reward_fn": reward, "environment": LastDigit()}, "exclude each other"),
        ({"reward_fn": reward, "dataset": None}, "nothing to ask"),
        ({"reward_fn": reward, "dataset": []}, "no rows|empty"),
        ({"reward_fn": reward, "dataset": [{"foo": "1"}]}, "column"),
        ({"reward_fn": lambda prompt, response: 1 / 0}, "ZeroDivisionError"),
        ({"reward_fn": reward, "ks": [3], "num_generations": 2}, "ks must be from 1"),
        ({"reward_fn": reward, "greedy": True, "num_generations": 2}, "same answer"),
        ({"reward_fn": reward, "temprature": 1.0}, "did you mean 'temperature'"),
        ({"reward_fn": reward, "backend": "vlm"}, "vllm"),
        ({"env": {"name": "sortin"}}, "sorting"),
    ],
)
def test_bad_input_is_named_before_anything_starts(tiny_model, arguments, message):
    with pytest.raises(UserError, match=message):
        evaluate(tiny_model, **{"dataset": ROWS, **arguments})


def test_a_run_without_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        find_target(tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        evaluate(tmp_path / "nowhere", ROWS, reward)
