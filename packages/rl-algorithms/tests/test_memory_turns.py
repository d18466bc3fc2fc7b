"""The order in which models that share devices are told to free their memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import rl_algorithms as rl
import rl_models
from rl_algorithms.evaluation import evaluate
from rl_algorithms.trainers.steps.memory_turns import MemoryTurns, Turn
from rl_distributed.batch.batched_data_dict import BatchedDataDict

ROWS = [{"prompt": f"{a}+1="} for a in range(8)]
SETTINGS = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "max_new_tokens": 2,
    "max_total_sequence_length": 16,
    "max_num_steps": 2,
    "checkpointing": {"enabled": False},
}


class Recording:
    """Records its calls under its name."""

    cluster = None

    def __init__(self, calls, name, cluster=None):
        self.calls, self.name, self.cluster = calls, name, cluster
        self.failing = ""

    def note(self, what):
        self.calls.append(f"{self.name}.{what}" if self.name else what)
        if what == self.failing:
            self.failing = ""
            raise RuntimeError(f"{what} was told to fail")


class Model(Recording):
    """A policy, critic or teacher."""

    def prepare_for_training(self):
        self.note("prepare_for_training")

    def finish_training(self):
        self.note("finish_training")

    def train(
        self,
        rows,
        loss,
        eval_mode=False,
        *,
        global_batch_size,
        micro_batch_size=None,
        timer=None,
    ):
        self.note("measure" if eval_mode else "train")
        ones = torch.ones(rows.size // global_batch_size)
        return {"loss": ones, "grad_norm": ones, "lr": ones, "all_mb_metrics": {}}

    def get_logprobs(self, rows, timer=None):
        self.note("logprobs")
        return {"logprobs": torch.zeros(rows["input_ids"].shape)}

    def get_reference_policy_logprobs(self, rows, timer=None):
        self.note("reference")
        return {"reference_logprobs": torch.zeros(rows["input_ids"].shape)}

    def get_values(self, rows, timer=None):
        self.note("values")
        return {"values": torch.zeros(rows["input_ids"].shape)}

    def get_topk_logits(self, rows, k, **settings):
        self.note("topk")
        return {}


class Generator(Recording):
    """Emits one token, a different one for each row."""

    weight_version = 0

    def prepare_for_generation(self):
        self.note("prepare_for_generation")

    def finish_generation(self):
        self.note("finish_generation")

    def generate(self, data, greedy=False, *, sampling=None):
        self.note("generate")
        ids, lengths = data["input_ids"], data["input_lengths"]
        size = len(lengths)
        out = torch.nn.functional.pad(ids, (0, 1))
        out[torch.arange(size), lengths] = ids[:, 0] + torch.arange(size) % 2
        columns = {
            "output_ids": out,
            "generation_lengths": torch.ones(size, dtype=torch.int64),
            "unpadded_sequence_lengths": lengths + 1,
            "logprobs": torch.zeros(out.shape),
            "truncated": torch.zeros(size, dtype=torch.bool),
            "weight_version": torch.full((size,), self.weight_version),
        }
        return BatchedDataDict(columns)


class Sync:
    def __init__(self, policy, generation):
        self.calls, self.generation = policy.calls, generation
        self.is_stale = True

    def mark_stale(self):
        self.is_stale = True

    def sync_weights(self, timer=None, *, version=None):
        self.calls.append("sync")
        self.generation.weight_version = version
        self.is_stale = False

    def take_confirmed(self):
        return []

    def close(self):
        pass


@pytest.fixture
def fit(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(rl_models, "WeightSynchronizer", Sync)

    def run(trainer_class, policy, generation, *, val_dataset=None, **settings):
        further = {
            name: settings.pop(name)
            for name in ("critic", "teacher")
            if isinstance(settings.get(name), Model)
        }
        trainer = trainer_class.from_pretrained(
            tiny_model,
            policy=policy,
            generation=generation,
            output_dir=str(tmp_path / "run"),
            **{**SETTINGS, **settings},
        )
        trainer.given = replace(trainer.given, **further)
        score = iter(range(1000))
        return trainer.fit(
            ROWS,
            val_dataset=val_dataset,
            reward_fn=lambda prompt, response: float(next(score) % 2),
            overwrite=True,
            progress=False,
        )

    return run


def parts(*further, clusters=(None, None)):
    calls = []
    models = [Model(calls, name) for name in further]
    policy, generator = Model(calls, "", clusters[0]), Generator(calls, "", clusters[1])
    return calls, policy, generator, models


SAMPLING = ["finish_training", "sync", "prepare_for_generation", "generate"]


def test_a_run_of_grpo(fit):
    calls, policy, generator, _ = parts()
    step = [
        *SAMPLING,
        "finish_generation",
        "prepare_for_training",
        "train",
    ]
    result = fit(
        rl.GRPOTrainer, policy, generator, loss_fn={"reference_policy_kl_penalty": 0}
    )
    assert calls == [*step, *step, "finish_training"]
    timed = [name for name in result.metrics if "finish_" in name or "prepare_" in name]
    assert sorted(timed) == [
        "timing:finish_generation",
        "timing:prepare_for_generation/total",
        "timing:prepare_for_generation/transfer_and_update_weights",
        "timing:prepare_for_training",
    ]


def test_log_probs_are_taken_when_generation_has_freed_its_memory(fit):
    calls, policy, generator, _ = parts()
    fit(
        rl.GRPOTrainer,
        policy,
        generator,
        max_num_steps=1,
        train_global_batch_size=2,
        loss_fn={"reference_policy_kl_penalty": 0.1},
    )
    assert calls == [
        *SAMPLING,
        "finish_generation",
        "logprobs",
        "reference",
        "prepare_for_training",
        "train",
        "finish_training",
    ]


def test_a_run_of_ppo_has_the_critic_take_part(fit):
    calls, policy, generator, (critic,) = parts("critic")
    fit(rl.PPOTrainer, policy, generator, critic=critic, ppo_epochs=2)
    step = [
        "finish_training",
        "critic.finish_training",
        "sync",
        "prepare_for_generation",
        "generate",
        "finish_generation",
        "critic.values",
        "logprobs",
        "prepare_for_training",
        "critic.prepare_for_training",
        *["critic.train", "train"] * 2,
    ]
    steps = [call for call in calls if call != "reference"]
    assert steps == [*step, *step, "finish_training", "critic.finish_training"]


def test_a_run_of_distillation(fit, tiny_model):
    calls, policy, generator, (teacher,) = parts("teacher")
    fit(
        rl.DistillationTrainer,
        policy,
        generator,
        **{"teacher.model_name": str(tiny_model)},
        teacher=teacher,
    )
    step = [
        *SAMPLING,
        "finish_generation",
        "teacher.topk",
        "prepare_for_training",
        "train",
    ]
    assert calls == [*step, *step, "finish_training"]


def test_a_validation_lets_the_next_step_go_on_sampling(fit):
    calls, policy, generator, _ = parts()
    fit(
        rl.GRPOTrainer,
        policy,
        generator,
        val_dataset=ROWS[:2],
        val_period=1,
        loss_fn={"reference_policy_kl_penalty": 0},
    )
    assert calls == [
        *SAMPLING,
        "finish_generation",
        "prepare_for_training",
        "train",
        *SAMPLING,
        "generate",
        "finish_generation",
        "prepare_for_training",
        "train",
        *SAMPLING,
        "finish_generation",
    ]


def test_an_evaluation_frees_the_memory_of_a_generator_that_lives_on(tiny_model):
    calls, _, generator, _ = parts()
    evaluate(
        tiny_model,
        ROWS[:4],
        lambda prompt, response: 1.0,
        generation=generator,
        max_new_tokens=2,
        batch_size=2,
    )
    assert calls == [
        "prepare_for_generation",
        "generate",
        "generate",
        "finish_generation",
    ]


def test_models_on_clusters_of_their_own_keep_their_memory(fit):
    calls, policy, generator, _ = parts(clusters=(object(), object()))
    fit(rl.GRPOTrainer, policy, generator, loss_fn={"reference_policy_kl_penalty": 0})
    assert calls == ["sync", "generate", "train"] * 2


@pytest.mark.parametrize("failing", ["generate", "finish_generation", "train"])
def test_a_run_after_one_that_failed_begins_by_freeing_memory(fit, failing):
    calls, policy, generator, _ = parts()
    settings = {"max_num_steps": 1, "loss_fn": {"reference_policy_kl_penalty": 0}}
    model = policy if failing == "train" else generator
    model.failing = failing
    with pytest.raises(RuntimeError, match=re.escape(f"{failing} was told to fail")):
        fit(rl.GRPOTrainer, policy, generator, **settings)
    assert calls[-1] == failing
    calls.clear()
    fit(rl.GRPOTrainer, policy, generator, **settings)
    assert calls == [
        *SAMPLING,
        "finish_generation",
        "prepare_for_training",
        "train",
        "finish_training",
    ]


def test_a_policy_with_nothing_to_do_is_not_called():
    class Plain(rl_models.PolicyInterface):
        def train(self, *arguments, **settings):
            raise NotImplementedError

    plain = Plain()
    turns = MemoryTurns(plain, plain)
    for turn in (turns.training, turns.generation):
        assert not turn.must_prepare
        assert not turn.must_finish


def test_a_turn_that_failed_to_end_ends_at_the_next_call():
    calls = []

    def finish():
        calls.append("finish")
        if len(calls) == 2:
            raise RuntimeError

    turn = Turn([lambda: calls.append("prepare")], [finish])
    turn.prepare()
    turn.prepare()
    assert calls == ["prepare"]
    with pytest.raises(RuntimeError):
        turn.finish()
    turn.finish()
    turn.finish()
    assert calls == ["prepare", "finish", "finish"]
