"""Weights loaded without model code of transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_models.errors import ModelLoadError
from rl_models.generation.huggingface.fused_decoder import FusedDecoder
from rl_models.generation.huggingface.loading import load_for_sampling
from rl_models.generation.huggingface.plain_weights import load_plain_model
from rl_models.ops.causal_lm import load_causal_lm
from rl_models.testing import build_tiny_model
from rl_models.weights.loading import loaded_tensors

CPU = torch.device("cpu")
SAMPLER = """
import sys
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend

backend = HuggingFaceGenerationBackend()
backend.setup(GenerationConfig(max_new_tokens=2).to_dict(), model_name=sys.argv[1])
import torch
from rl_distributed import BatchedDataDict
rows = {"input_ids": torch.tensor([[3, 4]]), "input_lengths": torch.tensor([2])}
assert len(backend.generate(BatchedDataDict(rows))["output_ids"]) == 1
heavy = ("sympy", "torch._dynamo", "torch.distributed.tensor",
         "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
print([name for name in heavy if name in sys.modules])
"""


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "removed"}))


def edit_weights(folder, edit):
    file = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def test_sampling_imports_no_model_code(tmp_path):
    command = [sys.executable, "-c", SAMPLER, str(build_tiny_model(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_of_transformers_gives_the_same_numbers(tmp_path, architecture, tied):
    folder = build_tiny_model(
        tmp_path, architecture=architecture, tie_word_embeddings=tied
    )
    plain, known = load_plain_model(folder), load_causal_lm(folder)
    assert plain is not None
    # Only the fused decoder takes both; it moves the weights.
    theirs = {name: value.clone() for name, value in loaded_tensors(known)}
    ours = dict(loaded_tensors(plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    positions = torch.arange(40)[None]
    probe = torch.empty(0)
    for made, expected in zip(
        plain.model.rotary_emb(probe, positions),
        known.model.rotary_emb(probe, positions),
        strict=True,
    ):
        assert torch.equal(made, expected)
    assert FusedDecoder.supports(known)
    assert plain.config.eos_token_id == known.generation_config.eos_token_id
    attention = known.model.layers[0].self_attn
    assert plain.model.layers[0].self_attn.scaling == attention.scaling


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
        {"tie_word_embeddings": "removed"},
        {"rms_norm_eps": "removed"},
        {"num_attention_heads": None},
        {"vocab_size": 7},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_unusual_config_is_left_to_transformers(tmp_path, changes):
    folder = build_tiny_model(tmp_path)
    assert load_plain_model(folder) is not None
    edit_config(folder, **changes)
    assert load_plain_model(folder) is None


def test_a_setting_of_the_run_counts_like_one_of_the_folder(tmp_path):
    folder = build_tiny_model(tmp_path)
    assert load_plain_model(folder, {"hidden_act": "gelu"}) is None
    plain = load_plain_model(folder, {"max_position_embeddings": 77})
    assert plain is not None
    assert plain.config.context_length == 77


@pytest.mark.parametrize(
    "edit",
    [
        lambda weights: weights.pop("model.norm.weight"),
        lambda weights: weights.update({"model.more.weight": torch.ones(1)}),
        lambda weights: weights.update({"model.norm.weight": torch.ones(3)}),
    ],
    ids=["missing", "unknown", "other shape"],
)
def test_unusual_weights_are_left_to_transformers(tmp_path, edit):
    folder = build_tiny_model(tmp_path)
    edit_weights(folder, edit)
    assert load_plain_model(folder) is None


def test_adapters_and_hub_names_are_left_to_transformers(tmp_path):
    folder = build_tiny_model(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert load_plain_model(folder) is None
    assert load_plain_model("organisation/model") is None
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_plain_model(tmp_path / "none")


def test_a_cut_off_file_is_told_as_before(tmp_path):
    folder = build_tiny_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"cut")
    assert load_plain_model(folder) is None
    with pytest.raises(Exception, match="header"):
        load_for_sampling(str(folder), "float32", None, CPU)


def test_weights_may_be_spread_over_files_and_saved_in_bfloat16(tmp_path):
    folder = build_tiny_model(tmp_path)
    expected = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(expected)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        halves = {name: expected[name].bfloat16() for name in part}
        save_file(halves, folder / file)
    places = {name: file for file, part in files.items() for name in part}
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = load_plain_model(folder)
    assert plain is not None
    assert plain.dtype == torch.float32
    ours = dict(loaded_tensors(plain))
    assert all(torch.equal(ours[n], expected[n].bfloat16().float()) for n in names)


def test_what_ends_a_text_is_taken_from_the_folder(tmp_path):
    folder = build_tiny_model(tmp_path)
    saved = folder / "generation_config.json"
    saved.write_text(json.dumps({"eos_token_id": [1, 5]}))
    loaded = load_for_sampling(str(folder), "float32", None, CPU)
    assert loaded.generation_config.eos_token_id == [1, 5]
    saved.unlink()
    edit_config(folder, eos_token_id=6)
    loaded = load_for_sampling(str(folder), "float32", None, CPU)
    assert loaded.generation_config.eos_token_id == 6
