"""No key is silently ignored: keys that an algorithm does not read are rejected."""

from __future__ import annotations

import pytest

import rl_algorithms as rl
from rl_algorithms.evaluation import EvalConfig
from rl_algorithms.trainers.settings.keywords import build_config
from rl_algorithms.trainers.settings.unused_keys import idle_lines, of_validation
from rl_distributed.errors import ConfigError

ENV = {"name": "sorting"}
GENERATION = {"max_new_tokens": 4}
OFF_POLICY = {"distillation.on_policy": False}
UNREAD = [
    ("sft", "env", ENV),
    ("sft", "data.pass_rate_filter", {}),
    ("dpo", "data.pass_rate_filter", {}),
    ("rm", "data.pass_rate_filter", {}),
    ("distillation", "data.pass_rate_filter", {}),
    ("sft", "sft.val_greedy", False),
    ("sft", "sft.accuracy_threshold", 0.5),
    ("ppo", "ppo.positive_above", 0.5),
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


@pytest.mark.parametrize(
    ("key", "value"), [("train", "rows.jsonl"), ("pass_rate_filter", {})]
)
def test_an_evaluation_reads_no_training_data(key, value):
    with pytest.raises(ConfigError, match=rf"data\.{key} is not read here"):
        EvalConfig.from_dict({"data": {key: value}})


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


KL = "loss_fn.reference_policy_kl_penalty=0: loss_fn"
IDLE = [
    (
        "grpo",
        {"reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k2"},
        f'{KL}.reference_policy_kl_type="k2"',
    ),
    ("ppo", {"use_kl_in_reward": True}, f"{KL}.use_kl_in_reward=true"),
    (
        "grpo",
        {"disable_ppo_ratio": True, "ratio_clip_max": 0.3},
        "loss_fn.disable_ppo_ratio=true: loss_fn.ratio_clip_max=0.3",
    ),
    (
        "grpo",
        {"dynamic_sampling_max_gen_batches": 3},
        "grpo.use_dynamic_sampling=false: grpo.dynamic_sampling_max_gen_batches=3",
    ),
    (
        "distillation",
        {"rollout.retry.resample": "group"},
        'rollout.retry.max_attempts=1: rollout.retry.resample="group"',
    ),
    (
        "sft",
        {"checkpointing": {"enabled": False, "save_period": 3, "keep_latest_k": 2}},
        "checkpointing.enabled=false: checkpointing.save_period=3, "
        "checkpointing.keep_latest_k=2",
    ),
    (
        "dpo",
        {"data.streaming_shuffle_rows": 7},
        "data.streaming=false: data.streaming_shuffle_rows=7",
    ),
]


@pytest.mark.parametrize(("algorithm", "settings", "line"), IDLE)
def test_what_another_key_turns_off_is_named(algorithm, settings, line):
    whole = config(algorithm, settings)
    assert list(idle_lines(whole, whole.idle())) == [f"without effect, because {line}"]


@pytest.mark.parametrize("algorithm", rl.algorithm_names())
def test_defaults_are_not_named(algorithm):
    whole = config(algorithm, {})
    assert not list(idle_lines(whole, (*whole.idle(), of_validation(whole))))


def test_keys_of_validations_without_held_out_data_are_named():
    whole = config("grpo", {"val_period": 5, "val_greedy": False})
    assert list(idle_lines(whole, [of_validation(whole)])) == [
        "without effect, because there are no held-out data: grpo.val_period=5, "
        "grpo.val_greedy=false"
    ]
    whole = config("sft", {"val_period": 0})
    assert not list(idle_lines(whole, [of_validation(whole)]))


ROWS = [{"prompt": "1+1=", "answer": "2"}]


@pytest.mark.parametrize("key", ["val_at_start", "val_at_end"])
def test_a_validation_that_is_asked_for_needs_data(tiny_model, tmp_path, key):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=f"{key} asks for a validation"):
        rl.train(
            tiny_model,
            ROWS,
            algorithm="sft",
            max_total_sequence_length=32,
            output_dir=str(folder),
            **{key: True},
        )
    assert not folder.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing scores them"),
        ({"reward_fn": lambda prompt, response: 1.0}, "there are no held-out data"),
    ],
)
def test_answers_that_a_validation_samples_are_scored(
    tiny_model, tmp_path, given, message
):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        rl.train(
            tiny_model,
            ROWS,
            algorithm="sft",
            max_new_tokens=4,
            max_total_sequence_length=32,
            output_dir=str(folder),
            **given,
        )
    assert not folder.exists()
