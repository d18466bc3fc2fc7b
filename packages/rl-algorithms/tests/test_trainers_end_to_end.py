"""Real training on Ray with a tiny model."""

from __future__ import annotations

import itertools
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_algorithms as rl
from rl_algorithms.testing import check_trainer
from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles
from rl_distributed.errors import ConfigError, UserError

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(4)]
SUMS = [
    {**row, "answer": str(int(row["prompt"][0]) + int(row["prompt"][2]))}
    for row in ROWS
]
GRPO = {
    "num_prompts_per_step": 8,
    "num_generations_per_prompt": 8,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 64,
    "reference_policy_kl_penalty": 0.0,
    "lr": 3e-3,
}


def pooled(pool, trainer):
    """Return the same trainer on the processes of the pool."""
    return type(trainer)(trainer.config, pool=pool)


def train(pool, model, dataset, reward_fn=None, algorithm="grpo", **settings):
    """Run `rl.train` on the processes of a pool."""
    made = rl.get_algorithm(algorithm).from_pretrained(model, **settings)
    return pooled(pool, made).fit(dataset, reward_fn=reward_fn)


class TestGRPO:
    @pytest.mark.usefixtures("ray_cluster")
    def test_raises_the_reward(self, tiny_model, tmp_path):
        result = rl.train(
            model=tiny_model,
            dataset=ROWS,
            reward_fn=lambda prompt, response: 1.0 if response[:1] == "7" else 0.0,
            val_dataset=ROWS[:4],
            val_at_start=True,
            val_at_end=True,
            val_greedy=False,
            val_num_generations_per_prompt=8,
            max_num_steps=80,
            stop_at_validation_metric="val:reward",
            stop_at_validation_threshold=0.8,
            output_dir=str(tmp_path / "run"),
            **{**GRPO, "lr": 1e-2},
        )
        rewards = result.history.column("train:reward")[1]
        assert rewards[0] < 0.2
        assert rewards[-1] > 0.5
        assert result.metrics["val:reward"] >= 0.8
        assert "val:reward reached" in result.stop_reason
        assert result.metrics["train:token_mult_prob_error"] < 1 + 1e-5
        model = AutoModelForCausalLM.from_pretrained(result.model_path)
        tokenizer = AutoTokenizer.from_pretrained(result.model_path)
        ids = tokenizer("1+2=", return_tensors="pt")
        answer = model.generate(**ids, max_new_tokens=1, do_sample=False)
        assert tokenizer.decode(answer[0, -1]) == "7"

    def test_trainer_with_callbacks(self, pool, tiny_model, tmp_path):
        # Program 2 of the public surface: defaults, few rows, a callback.
        trainer = rl.GRPOTrainer.from_pretrained(
            tiny_model,
            num_prompts_per_step=32,
            output_dir=str(tmp_path / "run"),
        )
        trainer = pooled(pool, trainer)
        file = tmp_path / "data.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in ROWS))
        result = trainer.fit(
            dataset=str(file),
            reward_fn=lambda prompt, response: float(len(response)),
            callbacks=[rl.LoggingCallback()],
        )
        assert result.steps == 1
        assert result.metrics["train:kl_penalty"] == pytest.approx(0.0, abs=1e-6)

    def test_filters_and_several_optimizer_steps(self, pool, tiny_model, tmp_path):
        result = train(
            pool,
            model=tiny_model,
            dataset=ROWS[:12],
            reward_fn=lambda prompts, responses: [float("1" in r) for r in responses],
            max_num_steps=3,
            drop_zero_variance_groups=True,
            train_global_batch_size=16,
            output_dir=str(tmp_path / "run"),
            checkpointing={"enabled": False},
            **GRPO,
        )
        assert result.checkpoint_path is None
        assert result.metrics["train:num_samples"] <= 64
        assert result.metrics["train:num_samples"] % 8 == 0
        assert "timing:policy_and_reference_logprobs" in result.metrics

    def test_no_group_differs(self, pool, tiny_model, tmp_path):
        result = train(
            pool,
            model=tiny_model,
            dataset=ROWS,
            reward_fn=lambda prompt, response: 1.0,
            max_num_steps=6,
            drop_zero_variance_groups=True,
            output_dir=str(tmp_path / "run"),
            **GRPO,
        )
        assert result.metrics["train:zero_variance_rate"] == 1.0
        assert "train:loss" not in result.metrics
        (warning,) = result.warnings
        assert warning.startswith(
            "nothing to learn from: all 320 answers of the last 5 steps got the same "
            "reward (1)"
        )
        kept = json.loads((result.run_dir / "result.json").read_text())
        assert kept["warnings"] == [warning]

    @pytest.mark.usefixtures("ray_cluster")
    def test_two_workers_and_dynamic_sampling(self, tiny_model, tmp_path):
        result = rl.train(
            model=tiny_model,
            dataset=ROWS,
            reward_fn=lambda prompt, response: float(len(response) > 2),
            max_num_steps=2,
            use_dynamic_sampling=True,
            cluster={"workers_per_node": 2},
            output_dir=str(tmp_path / "run"),
            **GRPO,
        )
        assert result.metrics["train:num_samples"] == 64
        assert result.metrics["train:dynamic_sampling_num_gen_batches"] >= 1
        answers = RolloutFiles(result.run_dir, 0).read()
        # Groups without variance are left out.
        trained = [record for record in answers if "advantage" in record]
        assert trained
        for record in trained:
            expected = pytest.approx(record["logprobs"], abs=1e-3)
            assert record["trainer_logprobs"] == expected

    def test_keeps_the_contract(self, pool, tiny_model, tmp_path):
        def make(steps, folder):
            trainer = rl.GRPOTrainer.from_pretrained(
                tiny_model, max_num_steps=steps, output_dir=str(folder), **GRPO
            )
            return pooled(pool, trainer)

        def fit(trainer, callbacks, resume):
            reward = lambda prompt, response: float("1" in response)  # noqa: E731
            return trainer.fit(
                ROWS[:20], reward_fn=reward, callbacks=callbacks, resume=resume
            )

        check_trainer(make, fit, tmp_path)


class TestSFT:
    def test_lowers_the_loss_and_measures_answers(self, pool, tiny_model, tmp_path):
        trainer = rl.SFTTrainer.from_pretrained(
            tiny_model,
            train_global_batch_size=8,
            max_num_epochs=6,
            max_total_sequence_length=16,
            max_new_tokens=4,
            val_at_start=True,
            val_at_end=True,
            lr=3e-3,
            accuracy_threshold=1.0,
            output_dir=str(tmp_path / "run"),
        )
        trainer = pooled(pool, trainer)
        result = trainer.fit(
            SUMS,
            val_dataset=SUMS[:8],
            reward_fn=lambda prompt, response, answer: float(response == answer),
        )
        assert result.steps == 24
        losses = result.history.column("train:loss")[1]
        assert losses[-1] < 0.7 * losses[0]
        val = result.history.column("val:val_loss")[1]
        assert val[-1] < 0.7 * val[0]
        assert result.metrics["val:accuracy"] == result.metrics["val:reward"]
        assert set(trainer.validation.samples[0]) == {
            *("prompt", "response", "reward", "expected", "ending")
        }


class TestData:
    def test_mixture_with_a_validation_per_source(self, pool, tiny_model, tmp_path):
        trainer = rl.SFTTrainer.from_pretrained(
            tiny_model,
            train_global_batch_size=8,
            max_num_steps=2,
            max_total_sequence_length=16,
            max_new_tokens=2,
            val_at_end=True,
            split_validation_size=0.25,
            sequence_packing={"train_mb_tokens": 64},
            peak_tflops_per_worker=0.1,
            output_dir=str(tmp_path / "run"),
        )
        trainer = pooled(pool, trainer)
        result = trainer.fit(
            rl.Mixture({"low": SUMS[:16], "high": SUMS[16:]}, {"low": 3, "high": 1}),
            reward_fn=lambda prompt, response: float(len(response)),
        )
        names = ("val_loss", "reward")
        for name in names:
            low, high = (result.metrics[f"val:{s}/{name}"] for s in ("low", "high"))
            assert result.metrics[f"val:{name}"] == pytest.approx((low + high) / 2)
        assert {s["dataset"] for s in trainer.validation.samples} == {"low", "high"}
        assert 0 < result.metrics["performance:train_fp_utilization"] < 1

    def test_endless_stream(self, pool, tiny_model, tmp_path):
        def sums():
            for number in itertools.count():
                yield SUMS[number % 32]

        result = train(
            pool,
            tiny_model,
            sums,
            algorithm="sft",
            train_global_batch_size=8,
            max_num_steps=3,
            max_total_sequence_length=16,
            output_dir=str(tmp_path / "run"),
        )
        assert result.steps == 3
        assert result.metrics["train:num_samples"] == 8


class TestBadInput:
    """Each mistake is found before Ray starts or a model is loaded."""

    def fit(self, model, tmp_path, dataset=ROWS, reward_fn=None, **settings):
        settings = {**GRPO, "max_num_steps": 1, **settings}
        reward_fn = reward_fn or (lambda prompt, response: 0.0)
        output = str(tmp_path / "run")
        return rl.train(model, dataset, reward_fn, output_dir=output, **settings)

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ({"num_prompt_per_step": 3}, "did you mean 'num_prompts_per_step'"),
            ({"train_global_batch_size": 7}, "must divide the samples"),
            ({"dataset": []}, "no rows|empty"),
            ({"dataset": "no/such/file.jsonl"}, "no/such/file.jsonl"),
            ({"dataset": [{"foo": "1"}]}, "column"),
            ({"dataset": [{"prompt": "1" * 60}]}, "tokens"),
            ({"reward_fn": lambda prompt, response: 1 / 0}, "ZeroDivisionError"),
            ({"reward_fn": lambda prompt, response: float("nan")}, "nan|NaN"),
            ({"reward_fn": lambda prompts, responses: [1.0]}, "1"),
            ({"algorithm": "grop"}, "grpo"),
            ({"policy.backend": "dtensr"}, "dtensor"),
        ],
    )
    def test_message(self, tiny_model, tmp_path, case, message):
        with pytest.raises(UserError, match=message):
            self.fit(tiny_model, tmp_path, **case)
        assert not (tmp_path / "run").exists(), "no run folder is left"

    def test_missing_model(self, tmp_path):
        with pytest.raises(UserError, match="nowhere"):
            self.fit(tmp_path / "nowhere", tmp_path)

    def test_no_reward(self, tiny_model):
        with pytest.raises(ConfigError, match="reward_fn"):
            rl.train(tiny_model, ROWS)
