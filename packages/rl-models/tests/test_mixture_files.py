"""Experts assembled from files with one tensor per expert."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from rl_models.checkpoint.mixture_files import MixtureFiles
from rl_models.checkpoint.weight_files import WeightFiles

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=3),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        mlp_only_layers=[0],
    ),
}


@pytest.fixture(params=sorted(CONFIGS))
def saved(request, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_parameters_and_their_parts_are_those_of_the_model(saved):
    model, folder = saved
    files = MixtureFiles(WeightFiles(folder))
    parameters = dict(model.named_parameters())
    assert files.shapes == {n: tuple(p.shape) for n, p in parameters.items()}
    for name, parameter in parameters.items():
        whole = (slice(None),) * parameter.ndim
        assert torch.equal(files.read_part(name, parameter.shape, whole), parameter)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape = parameters[name].shape
    half = shape[1] // 2
    for part in (
        (slice(1, 3), slice(0, shape[1]), slice(0, shape[2])),
        (slice(2, 2), slice(0, shape[1]), slice(0, shape[2])),
        (slice(0, 1), slice(half - 2, half + 3), slice(4, 7)),
        (slice(2, 3), slice(half + 1, shape[1]), slice(0, 1)),
    ):
        found = files.read_part(name, shape, part)
        assert torch.equal(found, parameters[name][part])


def test_experts_of_which_one_is_missing_have_no_shape(saved):
    model, folder = saved
    file = folder / "model.safetensors"
    tensors = load_file(file)
    odd = [name for name in tensors if ".layers.1." in name and ".experts.1." in name]
    del tensors[odd[0]]
    save_file(tensors, file)
    shapes = MixtureFiles(WeightFiles(folder)).shapes
    missing = {name for name, _ in model.named_parameters() if name not in shapes}
    experts = "model.layers.1.mlp.experts"
    assert missing == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
