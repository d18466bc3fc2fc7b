"""Parameter counts of the plan against the models of transformers, on `meta`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rl_models import ModelBuildConfig, ModelLoadError, build_model
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.config import PolicyConfig
from rl_models.planning.model_config import known_models, model_config
from rl_models.planning.model_shape import shape_of_build, shape_of_config

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without grouped heads": ("llama", {"num_key_value_heads": None}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("llama", {"head_dim": 16}),
    "mistral": ("mistral", {}),
    "mistral with wide heads": ("mistral", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma untied": ("gemma", {"head_dim": 16, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3-moe": ("qwen3_moe", _MOE),
    "qwen3-moe with wide heads": ("qwen3_moe", {**_MOE, "head_dim": 16}),
    "qwen3-moe with some dense layers": (
        "qwen3_moe",
        {**_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
}


def saved_config(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    """Write a `config.json` like `save_pretrained`; return the config."""
    config = AutoConfig.for_model(family, **{**_SIZES, **settings})
    config.save_pretrained(folder)
    return config


def num_parameters(auto_class: Any, config: Any) -> int:
    with torch.device("meta"):
        model = auto_class.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", _MODELS)
def test_parameters_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    config = saved_config(tmp_path, *_MODELS[name])
    shape = shape_of_config(read_model_config(tmp_path) or {}, name)
    assert shape.is_known
    assert shape.num_parameters == num_parameters(AutoModelForCausalLM, config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_heads_that_give_numbers_are_counted(tmp_path: Path, family: str) -> None:
    config = saved_config(tmp_path, family, {"num_labels": 1})
    fields = read_model_config(tmp_path) or {}
    assert shape_of_config(fields, family, "value").num_parameters == num_parameters(
        AutoModelForTokenClassification, config
    )
    assert shape_of_config(fields, family, "reward").num_parameters == num_parameters(
        AutoModelForSequenceClassification, config
    )


def test_the_fields_of_published_configs_suffice() -> None:
    """Older configs omit the defaults of their class."""
    qwen = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
    qwen |= {"num_attention_heads": 14, "num_key_value_heads": 2}
    qwen |= {"num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True}
    assert shape_of_config(qwen, "Qwen2.5-0.5B").num_parameters == 494_032_768
    mixtral = {"model_type": "mixtral", "hidden_size": 4096, "vocab_size": 32000}
    mixtral |= {"intermediate_size": 14336, "num_attention_heads": 32}
    mixtral |= {"num_hidden_layers": 32, "num_key_value_heads": 8}
    shape = shape_of_config(mixtral, "Mixtral-8x7B")
    assert shape.num_parameters == 46_702_792_704
    assert shape.num_active_parameters == 12_879_925_248


def test_a_token_meets_only_some_of_the_experts(tmp_path: Path) -> None:
    saved_config(tmp_path, "qwen3_moe", _MOE)
    shape = shape_of_config(read_model_config(tmp_path) or {}, "moe")
    idle = shape.num_parameters - shape.num_active_parameters
    assert idle == 5 * 4 * 3 * 48 * 24


def test_an_unknown_family_is_counted_by_general_fields() -> None:
    fields = {**_SIZES, "model_type": "new", "num_experts": 4, "num_experts_per_tok": 2}
    shape = shape_of_config(fields, "new")
    assert not shape.is_known
    assert (shape.num_experts, shape.expert_size, shape.num_expert_layers) == (
        4,
        112,
        5,
    )


def test_the_part_that_reads_is_counted_of_a_model_that_sees() -> None:
    shape = shape_of_config({"model_type": "seer", "text_config": _SIZES}, "seer")
    assert shape.hidden_size == _SIZES["hidden_size"]
    assert not shape.is_known


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_missing_field_is_named(field: str) -> None:
    fields = {key: value for key, value in _SIZES.items() if key != field}
    with pytest.raises(ModelLoadError, match=rf"has no {field}.*overrides\.{field}=N"):
        shape_of_config(fields, "m")


@pytest.mark.parametrize("value", ["4", 1.5, True, -1])
def test_a_field_that_is_no_number_is_named(value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"num_key_value_heads .* whole number"):
        shape_of_config({**_SIZES, "num_key_value_heads": value}, "m")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_model_that_is_built_has_the_size_that_was_planned(
    tmp_path: Path, architecture: Any
) -> None:
    config = ModelBuildConfig.from_dict(
        {
            "architecture": architecture,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "tokenizer": {"characters": "0123", "special_tokens": ["<turn>"]},
        }
    )
    folder = build_model(config, tmp_path)
    saved = json.loads((folder / "config.json").read_text())
    planned = shape_of_build(config).num_parameters
    assert planned == shape_of_config(saved, "built").num_parameters


# Parameters in billions, according to the model cards.
_PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-Coder-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-Coder-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7,
    "Qwen/Qwen2.5-32B": 32.5,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "meta-llama/Llama-3.2-1B": 1.23,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6,
}


def test_sizes_of_published_models_give_the_published_counts() -> None:
    assert set(known_models()) == set(_PUBLISHED)
    for name, billions in _PUBLISHED.items():
        shape = shape_of_config(known_models()[name], name)
        assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.015), name


def test_a_plan_knows_published_models_and_their_variants() -> None:
    names = ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"]
    plain, tuned = (model_config(PolicyConfig(model_name=name)) for name in names)
    assert plain == tuned == known_models()[names[0]]
    longer = PolicyConfig(
        model_name=names[0], hf_config_overrides={"num_hidden_layers": 2}
    )
    assert model_config(longer)["num_hidden_layers"] == 2
    with pytest.raises(ModelLoadError, match=r"put its config\.json into a folder"):
        model_config(PolicyConfig(model_name="nobody/nothing-7B"))
