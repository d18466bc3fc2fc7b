"""Distillation on Ray with tiny models."""

from __future__ import annotations

import pytest

import rl_algorithms as rl
from rl_algorithms.distillation.config import DistillationConfig
from rl_algorithms.distillation.unscored import Unscored
from rl_algorithms.distillation.vocabulary import check_same_vocabulary
from rl_algorithms.testing import check_trainer
from rl_distributed.errors import ConfigError, UserError
from rl_envs.testing import check_environment
from rl_models.build.model import (
    ModelBuildConfig,
    TokenizerBuildConfig,
    build_model,
    build_tokenizer,
)

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(4)]
DEMONSTRATIONS = [{**row, "answer": row["prompt"][::-1]} for row in ROWS]
SETTINGS = {
    "num_prompts_per_step": 8,
    "num_generations_per_prompt": 2,
    "max_new_tokens": 4,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 5,
    "topk_logits_k": 6,
    "bucket_outside_topk": True,
    "lr": 3e-3,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    config = ModelBuildConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return build_model(config, tmp_path_factory.mktemp("teacher") / "model", seed=9)


def make(student, teacher, folder, steps, pool, **settings):
    trainer = rl.DistillationTrainer.from_pretrained(
        student,
        teacher=str(teacher),
        max_num_steps=steps,
        output_dir=str(folder),
        **{**SETTINGS, **settings},
    )
    return rl.DistillationTrainer(trainer.config, pool=pool)


class TestDistillation:
    @pytest.mark.parametrize(
        "settings",
        [
            {"kl_type": "forward", "bucket_outside_topk": False},
            {"kl_type": "jsd", "mixed_kl_weight": 0.3, "val_greedy": False},
        ],
        ids=lambda settings: settings["kl_type"],
    )
    def test_comes_closer_to_the_teacher(
        self, tiny_model, teacher, tmp_path, pool, settings
    ):
        trainer = make(
            tiny_model,
            teacher,
            tmp_path / "run",
            30,
            pool,
            val_at_start=True,
            val_at_end=True,
            val_period=0,
            lr=1e-2,
            **settings,
        )
        result = trainer.fit(ROWS, val_dataset=ROWS[:6])
        before, after = result.history.column("val:val_loss")[1]
        assert after < 0.8 * before
        assert result.metrics["train:num_samples"] == 16
        assert 0 < result.metrics["train:teacher_topk_mass"] <= 1
        assert "train:reward" not in result.metrics, "nothing was scored"
        assert "timing:teacher_logprob_inference" in result.metrics

    def test_a_teacher_that_is_the_student_teaches_nothing(
        self, tiny_model, tmp_path, pool
    ):
        trainer = make(
            tiny_model, tiny_model, tmp_path / "run", 1, pool, topk_logits_k=1000
        )
        result = trainer.fit(
            ROWS,
            val_dataset=ROWS[:6],
            reward_fn=lambda prompt, response: float(len(response)),
        )
        assert result.metrics["train:loss"] == pytest.approx(0, abs=1e-6)
        assert result.metrics["train:top1_agreement"] == 1
        assert result.metrics["train:teacher_topk_mass"] == pytest.approx(1)
        assert result.metrics["train:reward"] > 0

    def test_keeps_the_contract(self, tiny_model, teacher, tmp_path, pool):
        def fit(trainer, callbacks, resume):
            return trainer.fit(ROWS[:20], callbacks=callbacks, resume=resume)

        check_trainer(
            lambda steps, folder: make(tiny_model, teacher, folder, steps, pool),
            fit,
            tmp_path,
        )

    def test_learns_from_the_answers_of_the_data(
        self, tiny_model, teacher, tmp_path, pool
    ):
        trainer = make(
            tiny_model,
            teacher,
            tmp_path / "run",
            30,
            pool,
            on_policy=False,
            num_generations_per_prompt=1,
            val_at_start=True,
            val_at_end=True,
            val_period=0,
            lr=1e-2,
        )
        result = trainer.fit(DEMONSTRATIONS, val_dataset=DEMONSTRATIONS[:6])
        before, after = result.history.column("val:val_loss")[1]
        assert after < 0.7 * before
        assert "timing:generation" not in result.metrics

    @pytest.mark.matrix
    def test_two_ranks_equal_one(self, tiny_model, teacher, tmp_path, pool):
        losses = []
        for ranks in (1, 2):
            trainer = make(
                tiny_model,
                teacher,
                tmp_path / str(ranks),
                4,
                pool,
                num_prompts_per_step=6,
                num_generations_per_prompt=1,
                # An epoch ends with a step of 3 rows, which two ranks cannot halve.
                drop_last=False,
                cluster={"workers_per_node": ranks},
            )
            losses.append(trainer.fit(ROWS[:9]).history.column("train:loss")[1])
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_teacher_takes_over_what_it_does_not_say():
    config = DistillationConfig.from_dict(
        {
            "policy": {
                "model_name": "student",
                "max_total_sequence_length": 64,
                "precision": "bfloat16",
            },
            "teacher": {"model_name": "teacher", "precision": "float32"},
        }
    )
    assert config.teacher.max_total_sequence_length == 64
    assert config.teacher.precision == "float32"
    assert config.policy.generation.max_new_tokens == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "nowhere/at/all"}, "nowhere/at/all"),
        ({"teacher": {"model_name": "m", "max_total_sequence_length": 8}}, "at least"),
        ({"max_new_tokens": 16}, "leave room for the prompt"),
        ({"on_policy": False}, "belongs to on_policy=true"),
        ({"topk_logits_k": 0}, "greater than 0"),
        ({"val_greedy": True, "stop_at_validation_threshold": 1.0}, "belong together"),
    ],
)
def test_bad_settings_are_found_before_a_model_is_loaded(
    tiny_model, tmp_path, settings, message
):
    values = {
        **SETTINGS,
        "teacher": str(tiny_model),
        "max_num_steps": 1,
        "output_dir": str(tmp_path / "run"),
        **settings,
    }
    with pytest.raises(UserError, match=message):
        rl.train(tiny_model, ROWS, algorithm="distillation", **values)
    assert not (tmp_path / "run").exists()


def test_vocabularies_must_agree():
    digits = build_tokenizer(TokenizerBuildConfig(characters="0123"))
    same = build_tokenizer(TokenizerBuildConfig(characters="0123"))
    other = build_tokenizer(TokenizerBuildConfig(characters="0132"))
    check_same_vocabulary(digits, same)
    with pytest.raises(ConfigError, match=r"same vocabulary.*'[23]'"):
        check_same_vocabulary(digits, other)


def test_unscored_is_an_environment():
    check_environment(Unscored())
