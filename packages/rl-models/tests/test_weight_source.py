"""Ranks that share a model read only the parts that they keep."""

from __future__ import annotations

import os
import socket

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rl_models.config import PolicyConfig
from rl_models.ops.causal_lm import causal_lm_skeleton, load_causal_lm
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.training.dtensor.weight_source import open_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
NUM_LAYERS = 24
WAYS = {
    "fsdp": {},
    "tensor": {"parallelism": {"tensor": 2}},
    "context": {"parallelism": {"context": 2}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "expert": {"parallelism": {"expert": 2}},
    "value": {"head": "value"},
    "lora": {"lora": {"r": 2, "alpha": 4.0}},
}


def _save(folder, config_class, **settings):
    torch.manual_seed(0)
    config = config_class(**{**SIZES, "num_hidden_layers": 2, **settings})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def deep_models(tmp_path_factory):
    """Return models by `WAYS` with many layers, each a small part; weights tied."""
    folder = tmp_path_factory.mktemp("deep")
    sizes = {"num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": True}
    dense = _save(folder / "dense", Qwen2Config, **sizes)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    mixture = _save(folder / "mixture", Qwen3MoeConfig, **sizes, **experts)
    return {way: str(mixture if way == "expert" else dense) for way in WAYS}


@pytest.fixture(scope="module")
def ranks(ray_cluster, deep_models):
    """Return both results of two ranks for each of `WAYS`."""

    def load(rank, port, folders, ways, mode_class):
        from rl_models.training.dtensor import (  # noqa: PLC0415
            DTensorTrainingBackend,
        )

        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        found = {}
        for way, settings in ways.items():
            folder = folders[way]
            config = PolicyConfig(
                model_name=folder, max_total_sequence_length=64, **settings
            )
            backend, memory = DTensorTrainingBackend(), mode_class()
            with memory:
                backend.setup(config.to_dict())
            model = backend.model
            at_start = memory.most
            with memory:
                backend.load_checkpoint(folder)
            found[way] = {
                "at_start": at_start,
                "most": memory.most,
                "weights": dict(model.full_tensors()),
                "buffers": dict(model.module.named_buffers()),
                "names": list(model.parameters),
                "trained": list(model.trained),
            }
        backend.shutdown()
        return found

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    task = ray.remote(num_cpus=1)(load)
    mode = _mode_class()
    calls = [task.remote(r, port, deep_models, WAYS, mode) for r in range(2)]
    return ray.get(calls, timeout=240)


def _mode_class():
    """Return a class made here, for workers that cannot import this file."""

    class LiveBytes(TorchDispatchMode):
        """Tracks the peak bytes of live CPU tensors."""

        def __init__(self):
            super().__init__()
            self.most, self._seen = 0, {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            from torch.multiprocessing.reductions import (  # noqa: PLC0415
                StorageWeakRef,
            )
            from torch.utils._pytree import tree_leaves  # noqa: PLC0415

            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves((args, kwargs, result)):
                if type(leaf) is torch.Tensor and leaf.device.type == "cpu":
                    storage = leaf.untyped_storage()
                    key = StorageWeakRef(storage)
                    self._seen[key.cdata] = (key, storage.nbytes())
            self._seen = {c: s for c, s in self._seen.items() if not s[0].expired()}
            self.most = max(self.most, sum(size for _, size in self._seen.values()))
            return result

    return LiveBytes


@pytest.mark.parametrize("way", WAYS)
def test_no_rank_ever_holds_the_whole_model(ranks, deep_models, way):
    whole = load_causal_lm(deep_models[way])
    total = sum(p.nbytes for p in whole.parameters())
    for found in ranks:
        # Half of it, and temporaries: a probed layer, a tensor being read.
        assert 0.45 * total < found[way]["at_start"] < 0.75 * total
        assert found[way]["most"] < 0.75 * total


@pytest.mark.parametrize("way", WAYS)
def test_parts_are_bitwise_those_of_the_whole_model(ranks, deep_models, way):
    if way == "value":
        whole = load_scalar_model(deep_models[way], "value")
    else:
        whole = load_causal_lm(deep_models[way])
    expected, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    for found in ranks:
        found = found[way]
        # Tied weights remain tied: the head is not among them.
        assert found["weights"].keys() == expected.keys()
        for name, value in found["weights"].items():
            assert torch.equal(value, expected[name]), name
        assert found["buffers"].keys() == buffers.keys()
        for name, value in found["buffers"].items():
            assert torch.equal(value, buffers[name]), name
        if way == "lora":
            assert all(".lora_" in name for name in found["trained"])
        else:
            own = [name for name in expected if name in found["names"]]
            assert found["trained"] == found["names"] == own
    names = {name for found in ranks for name in found[way]["names"]}
    assert way == "lora" or names == expected.keys()
    if way != "pipeline":
        assert all(found[way]["names"] == ranks[0][way]["names"] for found in ranks)


FAMILIES = (Qwen2Config, Qwen3Config, LlamaConfig, Gemma2Config, Gemma3TextConfig)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_is_the_model_without_its_weights(tmp_path, family):
    folder = _save(tmp_path, family)
    whole = load_causal_lm(folder)
    drawn = torch.get_rng_state()
    empty = causal_lm_skeleton(str(folder))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.is_meta for parameter in empty.parameters())
    names = [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in empty.named_parameters()] == names
    for (name, got), (_, expected) in zip(
        empty.named_buffers(), whole.named_buffers(), strict=True
    ):
        assert torch.equal(got, expected), name
        assert got.dtype == expected.dtype
    assert empty.config.to_dict() == whole.config.to_dict()
    assert empty.generation_config.to_dict() == whole.generation_config.to_dict()
    assert not empty.training


def _change(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _untie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _rename(tensors):
    # As in older files of encoders; transformers renames it.
    tensors["model.norm.gamma"] = tensors.pop("model.norm.weight")


@pytest.mark.parametrize(
    ("change", "name"), [(_untie, "lm_head.weight"), (_rename, "model.norm.weight")]
)
def test_files_that_transformers_converts_are_loaded_whole(
    tmp_path, caplog, change, name
):
    folder = _save(tmp_path, Qwen2Config, tie_word_embeddings=True)
    config = PolicyConfig(model_name=str(folder))
    model, weights = open_model(config, folder, shared=True)
    assert weights is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    _change(folder, change)
    model, weights = open_model(config, folder, shared=True)
    assert weights is None
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert f"hold {name} in another way" in caplog.text
