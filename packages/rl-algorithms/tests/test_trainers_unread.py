"""No key is silently ignored: what an algorithm does not read it refuses."""

from __future__ import annotations

import pytest

import rl_algorithms as rl
from rl_algorithms.evaluation import EvalConfig
from rl_algorithms.trainers.settings import build_config
from rl_distributed.errors import ConfigError

ENV = {"name": "sorting"}
GENERATION = {"max_new_tokens": 4}
OFF_POLICY = {"distillation.on_policy": False}
UNREAD = [
    ("sft", "env", ENV),
    ("sft", "data.chosen_key", "better"),
    ("dpo", "env", ENV),
    ("dpo", "policy.generation", GENERATION),
    ("dpo", "data.output_key", "answer"),
    ("rm", "env", ENV),
    ("rm", "policy.generation", GENERATION),
    ("rm", "data.roles_to_train_on", ["user"]),
    ("grpo", "data.rejected_key", "worse"),
    ("grpo", "data.only_unmask_final", True),
    ("ppo", "data.add_eos", False),
    ("ppo", "critic.generation", GENERATION),
    ("distillation", "data.chosen_key", "better"),
    ("distillation", "teacher.optimizer.kwargs", {"lr": 1.0}),
    ("distillation", "teacher.generation", GENERATION),
    ("distillation", "teacher.train_micro_batch_size", 7),
]
OF_OTHERS = {
    "sft": ["rollout", "mismatch", "loss_fn", "grpo", "critic", "teacher"],
    "dpo": ["rollout", "mismatch", "rm", "critic", "teacher"],
    "rm": ["rollout", "mismatch", "dpo", "critic", "teacher"],
    "grpo": ["critic", "value_loss_fn", "teacher", "sft"],
    "ppo": ["teacher", "grpo"],
    "distillation": ["mismatch", "critic", "grpo"],
}


def config(algorithm, settings):
    needed = {"policy.model_name": "m"}
    if algorithm == "distillation":
        needed["teacher.model_name"] = "t"
    return build_config(
        rl.get_algorithm(algorithm).config_class, {**needed, **settings}
    )


@pytest.mark.parametrize(("algorithm", "key", "value"), UNREAD)
def test_a_key_that_is_not_read_is_refused(algorithm, key, value):
    config(algorithm, {})
    with pytest.raises(ConfigError, match=key.split(".")[-1]):
        config(algorithm, {key: value})


@pytest.mark.parametrize("algorithm", OF_OTHERS)
def test_sections_of_other_algorithms_are_unknown(algorithm):
    for section in OF_OTHERS[algorithm]:
        with pytest.raises(ConfigError, match=f"{section} is not a known key"):
            config(algorithm, {f"{section}.seed": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env", ENV),
        ("rollout.max_failed_rate", 0.1),
        ("rollout.retry.max_attempts", 2),
        ("distillation.max_rollout_turns", 2),
        ("distillation.val_greedy", False),
    ],
)
def test_a_student_that_does_not_sample_plays_no_conversations(key, value):
    config("distillation", {key: value})
    message = key.split(".")[0 if key.startswith("rollout") else -1]
    with pytest.raises(ConfigError, match=rf"{message} is not read here"):
        config("distillation", {**OFF_POLICY, key: value})


@pytest.mark.parametrize("algorithm", rl.algorithm_names())
def test_defaults_that_are_written_out_are_not_refused(algorithm):
    whole = config(algorithm, {})
    assert type(whole).from_dict(whole.to_dict()) == whole


def test_an_evaluation_reads_no_training_data():
    with pytest.raises(ConfigError, match=r"data\.train is not read here"):
        EvalConfig.from_dict({"data": {"train": "rows.jsonl"}})


@pytest.mark.parametrize(
    "settings",
    [
        {"early_stop": {"patience": 2, "metric": "val:val_loss"}},
        {
            "stop_at_validation_metric": "val:val_loss",
            "stop_at_validation_threshold": 0.1,
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize(
    "held_out", [{}, {"val_dataset": [{"prompt": "1+1=", "answer": "2"}]}]
)
def test_what_ends_a_run_must_be_measured(tiny_model, tmp_path, settings, held_out):
    with pytest.raises(ConfigError, match="no validation would measure it"):
        rl.train(
            tiny_model,
            [{"prompt": "1+1=", "answer": "2"}],
            algorithm="sft",
            max_total_sequence_length=32,
            val_period=0 if held_out else 1,
            output_dir=str(tmp_path / "run"),
            **held_out,
            **settings,
        )
    assert not (tmp_path / "run").exists()


def test_what_scores_answers_needs_answers(tiny_model, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="samples no answers"):
        rl.train(
            tiny_model,
            rows,
            lambda prompt, response: 1.0,
            algorithm="sft",
            output_dir=str(folder),
        )
    with pytest.raises(ConfigError, match="max_rollout_turns needs an environment"):
        rl.train(
            tiny_model,
            rows,
            algorithm="distillation",
            teacher=str(tiny_model),
            max_rollout_turns=2,
            output_dir=str(folder),
        )
    assert not folder.exists()
