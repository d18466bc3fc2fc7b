"""Model folders as weights: what is recorded, rejected, or detected as changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_models.errors import ModelLoadError, WeightSyncError
from rl_models.serving.folder_weights import (
    FolderWeights,
    ModelShape,
    verified_tensors,
)
from rl_models.testing import build_tiny_model

FILE = "model.safetensors"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def _change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(folder / FILE)
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, folder / FILE)


def test_every_tensor_arrives_as_it_is_in_the_file(folder: Path) -> None:
    weights = FolderWeights.read(folder)
    read = dict(verified_tensors(weights.folder, weights.to_plain()))
    expected = load_file(folder / FILE)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_an_index_of_several_files_is_followed(folder: Path) -> None:
    weights = load_file(folder / FILE)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    (folder / FILE).unlink()
    table = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    found = FolderWeights.read(folder)
    assert sorted(entry.name for _, entry in found.entries) == names
    index.write_text(json.dumps({"weight_map": {**table, "gone": "a.safetensors"}}))
    with pytest.raises(ModelLoadError, match="gone"):
        FolderWeights.read(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"b\.safetensors"):
        FolderWeights.read(folder)


def test_a_file_that_is_cut_off_is_refused(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-100])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        FolderWeights.read(folder)


def test_other_weights_of_the_same_model_fit(folder: Path, tmp_path: Path) -> None:
    shape = ModelShape.of(folder)
    other = build_tiny_model(tmp_path / "other", seed=5)
    shape.check(FolderWeights.read(other))


def test_another_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shape = ModelShape.of(folder)
    wider = build_tiny_model(tmp_path / "wider", intermediate_size=64)
    with pytest.raises(ModelLoadError, match="intermediate_size 64 instead of 48"):
        shape.check(FolderWeights.read(wider))
    _change(folder, "model.norm.weight", None)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is missing"):
        shape.check(FolderWeights.read(folder))
    _change(folder, "model.norm.weight", torch.ones(3))
    with pytest.raises(ModelLoadError, match=r"has shape \[3\] instead of \[32\]"):
        shape.check(FolderWeights.read(folder))
    _change(folder, "model.norm.weight", torch.ones(32))
    _change(folder, "extra", torch.ones(2))
    with pytest.raises(ModelLoadError, match="extra is unknown"):
        shape.check(FolderWeights.read(folder))


@pytest.mark.parametrize("way", ["value", "dtype", "gone", "no file", "cut off"])
def test_what_changes_after_it_was_noted_is_found(folder: Path, way: str) -> None:
    noted = FolderWeights.read(folder)
    name = "model.norm.weight"
    tensor = load_file(folder / FILE)[name]
    if way == "value":
        tensor[3] += 1e-6
        _change(folder, name, tensor)
    elif way == "dtype":
        _change(folder, name, tensor.bfloat16())
    elif way == "gone":
        _change(folder, name, None)
    elif way == "no file":
        (folder / FILE).unlink()
    else:
        data = (folder / FILE).read_bytes()
        (folder / FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightSyncError, match=FILE):
        list(verified_tensors(noted.folder, noted.to_plain()))
