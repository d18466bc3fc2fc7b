"""Lengths that default to the models' own, in every algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_algorithms import algorithm_names
from rl_algorithms.registry import get_config_class
from rl_algorithms.trainers.setup.component_checks import with_row_lengths
from rl_algorithms.trainers.setup.components import Components
from rl_distributed.errors import ConfigError


def model(folder: Path, context: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen2", "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make(algorithm: str, name: str, **settings):
    if algorithm == "distillation":
        settings.setdefault("teacher", name)
    policy = {"model_name": name, **settings.pop("policy", {})}
    tree = {"policy": policy, **settings}
    return get_config_class(algorithm).from_dict(tree)


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_null_takes_the_context_of_the_model(tmp_path, algorithm):
    config = make(algorithm, model(tmp_path / "model", 100))
    for name in ("policy", "critic", "teacher"):
        section = getattr(config, name, None)
        assert section is None or section.max_total_sequence_length == 100
    generation = config.policy.generation
    assert generation is None or generation.max_new_tokens == 50
    assert type(config).from_dict(config.to_dict()) == config


def test_answers_are_no_longer_than_asked_for(tmp_path):
    large = model(tmp_path / "model", 40_000)
    assert make("grpo", large).policy.generation.max_new_tokens == 256
    explicit = make("grpo", large, policy={"max_total_sequence_length": 4096})
    assert explicit.policy.generation.max_new_tokens == 2048
    with pytest.raises(ConfigError, match=r"leave room .* \(100\): got 100"):
        make(
            "grpo",
            model(tmp_path / "small", 100),
            policy={"generation": {"max_new_tokens": 100}},
        )


@pytest.mark.parametrize(
    ("algorithm", "second"), [("ppo", "critic"), ("distillation", "teacher")]
)
def test_a_second_model_with_a_smaller_context_bounds_the_rows(
    tmp_path, algorithm, second
):
    name, small = model(tmp_path / "model", 100), model(tmp_path / "small", 60)
    config = make(algorithm, name, **{second: {"model_name": small}})
    assert config.policy.max_total_sequence_length == 60
    assert getattr(config, second).max_total_sequence_length == 60
    with pytest.raises(ConfigError, match=r"lower policy.max_total_sequence_length"):
        make(
            algorithm,
            name,
            policy={"max_total_sequence_length": 80},
            **{second: {"model_name": small, "max_total_sequence_length": 60}},
        )


def test_models_that_are_asked_when_the_run_begins(tmp_path):
    config = make(
        "distillation", str(tmp_path / "later"), teacher=str(tmp_path / "teacher")
    )
    assert config.policy.max_total_sequence_length is None
    model(tmp_path / "later", 700)
    model(tmp_path / "teacher", 600)
    filled = with_row_lengths(config, Components())
    assert filled.policy.max_total_sequence_length == 600
    assert filled.teacher.max_total_sequence_length == 600
    assert filled.policy.generation == config.policy.generation
    # Components that are passed in are not queried.
    assert with_row_lengths(config, Components(policy=1, teacher=1)) is config
    assert with_row_lengths(filled, Components()) is filled
