"""Training states of several layouts, inspected and exported as plain model folders."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_distributed.errors import CheckpointError, ConfigError
from rl_models.checkpoint.conversion import convert_state, inspect_state
from rl_models.checkpoint.sharded import Box, Shard, write_shards, write_state
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError
from rl_models.training.dtensor import DTensorTrainingBackend


def _trained(folder, batch, loss, out, **settings):
    backend = DTensorTrainingBackend()
    config = PolicyConfig(
        model_name=str(folder), max_total_sequence_length=64, **settings
    )
    backend.setup(config.to_dict())
    batch["input_ids"] %= 16
    for _ in range(2):
        backend.train_step(batch, loss, global_batch_size=12, micro_batch_size=4)
    backend.save_checkpoint(out / "weights", out / "optimizer")
    return {name: value.clone() for name, value in backend.export_weights("float32")}


def _cut(source, folder):
    """Write a state as two ranks that shard rows, or columns, would."""
    parts = [{}, {}]
    for number, (name, value) in enumerate(sorted(source.items())):
        dim = number % value.ndim
        start = 0
        for rank, part in enumerate(value.chunk(2, dim=dim)):
            starts = [start if d == dim else 0 for d in range(value.ndim)]
            box = Box(tuple(value.shape), tuple(starts), tuple(part.shape))
            parts[rank][f"parameter/{name}"] = Shard(part.contiguous(), box)
            start += part.shape[dim]
    for rank in range(2):
        write_shards(folder, parts[rank], rank, 2)
    write_state(folder, {}, 2)


@pytest.fixture(scope="module")
def plain(tiny_folder, make_batch, nll_loss, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, _trained(tiny_folder, make_batch(), nll_loss, folder)


def test_a_state_tells_what_it_holds(plain):
    folder, weights = plain
    found = inspect_state(folder / "optimizer")
    assert found.num_ranks == 1
    assert found.shapes == {n: tuple(v.shape) for n, v in weights.items()}
    assert found.num_parameters == sum(v.numel() for v in weights.values())
    assert found.slots == ("exp_avg", "exp_avg_sq")
    assert not found.has_adapters
    assert found.gaps == ()


def test_a_state_of_any_layout_becomes_a_folder_bitwise(plain, tmp_path):
    folder, weights = plain
    _cut(weights, tmp_path / "cut")
    for state in (folder / "optimizer", tmp_path / "cut"):
        out = tmp_path / f"made-{state.name}"
        convert_state(state, folder / "weights", out)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for name, value in model.named_parameters():
            assert torch.equal(value, weights[name]), name
    convert_state(
        tmp_path / "cut", folder / "weights", tmp_path / "half", precision="bfloat16"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name].bfloat16()), name


def test_adapters_are_merged_into_their_base(
    tiny_folder, make_batch, nll_loss, tmp_path
):
    lora = {"r": 4, "alpha": 12.0, "use_rslora": True}
    weights = _trained(tiny_folder, make_batch(), nll_loss, tmp_path, lora=lora)
    state = tmp_path / "optimizer"
    assert inspect_state(state).has_adapters
    convert_state(state, tiny_folder, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    )
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match="give the folder of the adapter"):
        convert_state(state, tiny_folder, tmp_path / "x", adapter=tmp_path / "none")


def test_a_part_that_is_missing_is_named_and_nothing_is_left(plain, tmp_path):
    folder, weights = plain
    name, value = max(weights.items(), key=lambda item: item[1].numel())
    box = Box(tuple(value.shape), (0, 0), (1, value.shape[1]))
    write_shards(tmp_path / "s", {f"parameter/{name}": Shard(value[:1], box)}, 0, 1)
    write_state(tmp_path / "s", {}, 1)
    assert inspect_state(tmp_path / "s").gaps == (f"parameter/{name}",)
    with pytest.raises(CheckpointError, match=r"lacks .* numbers"):
        convert_state(tmp_path / "s", folder / "weights", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
    with pytest.raises(ConfigError, match="must be new"):
        convert_state(folder / "optimizer", folder / "weights", tmp_path / "s")


def test_all_files_of_the_tokenizer_are_copied(plain, tmp_path):
    folder, _ = plain
    model = tmp_path / "model"
    shutil.copytree(folder / "weights", model)
    # Of Mistral, of the first Qwen, and of models with several templates.
    files = ["tekken.json", "qwen.tiktoken", "chat_template.json"]
    files.append("additional_chat_templates/tools.jinja")
    for name in files:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}", encoding="utf-8")
    convert_state(folder / "optimizer", model, tmp_path / "out")
    for name in [*files, "tokenizer.json", "tokenizer_config.json"]:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize("has_layer", [False, True])
def test_a_base_that_an_adapter_does_not_fit_is_refused(
    tiny_folder, make_batch, nll_loss, tmp_path, has_layer
):
    _trained(tiny_folder, make_batch(), nll_loss, tmp_path, lora={"r": 2})
    base = tmp_path / "base"
    shutil.copytree(tiny_folder, base)
    weights = load_file(base / "model.safetensors")
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    whole = weights.pop(name)
    if has_layer:
        weights[name] = whole[:-1]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    has = r"one of shape" if has_layer else "none"
    with pytest.raises(ModelLoadError, match=rf"q_proj\.weight of shape .* has {has}"):
        convert_state(tmp_path / "optimizer", base, tmp_path / "out")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["base", "optimizer", "weights"]
