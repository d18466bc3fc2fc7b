"""Inspect a training state, and convert it to a plain model folder.

A state has the names and shapes of Hugging Face, whichever backend and layout wrote it.
Tensors are copied one at a time, so that a machine can convert a model that does not
fit into its memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rl_distributed.errors import CheckpointError, ConfigError
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.checkpoint.sharded import ShardedReader
from rl_models.checkpoint.tokenizer_copy import copy_tokenizer_files
from rl_models.checkpoint.weight_files import WeightFiles
from rl_models.errors import ModelLoadError

__all__ = ["StateSummary", "convert_state", "inspect_state"]

_PARAMETER = "parameter/"
_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class StateSummary:
    """Summary of a training state."""

    format: str
    num_ranks: int
    """Number of ranks that wrote it."""
    shapes: Mapping[str, tuple[int, ...]]
    """Whole shape of each parameter, by its name."""
    slots: tuple[str, ...]
    """Tensors that the optimizer keeps for a parameter."""
    num_bytes: int
    """Size of all its files."""
    has_adapters: bool
    gaps: tuple[str, ...]
    """Tensors of which a part is missing."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def inspect_state(folder: Path) -> StateSummary:
    """Summarize a training state; only its indices are read.

    Raises:
        CheckpointError: A file is missing or damaged, or the format is another.
    """
    reader = ShardedReader(folder)
    names = sorted(reader.names())
    kept = [n.removeprefix("optimizer/") for n in names if n.startswith("optimizer/")]
    parameters = [n for n in names if n.startswith(_PARAMETER)]
    return StateSummary(
        format=reader.format,
        num_ranks=reader.world_size,
        shapes={n.removeprefix(_PARAMETER): reader.shape(n) for n in parameters},
        slots=tuple(sorted({name.rpartition("/")[2] for name in kept})),
        num_bytes=sum(f.stat().st_size for f in folder.iterdir() if f.is_file()),
        has_adapters=any(name.endswith(_A) for name in parameters),
        gaps=tuple(name for name in names if reader.lacks(name)),
    )


def convert_state(
    folder: Path,
    model: Path,
    output: Path,
    *,
    precision: str = "float32",
    adapter: Path | None = None,
) -> None:
    """Write the model of a training state as a plain Hugging Face folder.

    Args:
        folder: The state.
        model: A model folder; its configuration and tokenizer are copied, and a base
            that the state does not hold is read from it.
        output: Target folder; it must not exist.
        precision: Data type of the weights.
        adapter: Folder with the `adapter_config.json` of the state's adapters, which
            holds their scale.

    Raises:
        CheckpointError: The state is damaged, or the folder cannot be written.
        ConfigError: `output` exists, or `adapter` is missing.
        ModelLoadError: The model folder lacks something.
    """
    if output.exists():
        raise ConfigError(f"the output folder must be new: {output} exists")
    read_model_config(model)
    state = _State(folder, model, adapter)
    # Written under another name and renamed at the end: a folder under the final name
    # is complete.
    made = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        _copy_configuration(model, made, precision)
        _write(made / "model.safetensors", state, precision)
        made.rename(output)
    except BaseException as error:
        # Whatever it is, such as a base that lacks a tensor: nothing shall be left.
        shutil.rmtree(made, ignore_errors=True)
        if not isinstance(error, OSError) or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"cannot write the model to {output}: {error}; free disk space or choose "
            "another folder"
        ) from error


class _State:
    """Plain weights of a state, adapters merged."""

    def __init__(self, folder: Path, model: Path, adapter: Path | None) -> None:
        self._reader = ShardedReader(folder)
        names = [n for n in self._reader.names() if n.startswith(_PARAMETER)]
        own = {n.removeprefix(_PARAMETER) for n in names}
        self._adapted = {n.removesuffix(_A) for n in own if n.endswith(_A)}
        plain = {n: n.replace(_BASE, "") for n in own if not n.endswith((_A, _B))}
        self._names = {short: name for name, short in plain.items()}
        self.shapes = {
            short: self._reader.shape(_PARAMETER + name)
            for short, name in self._names.items()
        }
        self._base: WeightFiles | None = None
        if self._adapted:
            self._scale = _scale(folder, adapter)
            lacking = {f"{path}.weight" for path in self._adapted} - self._names.keys()
            # A state leaves the frozen base out if it is that of `policy.model_name`.
            if lacking:
                self._base = WeightFiles(model)
                self.shapes = {**self._base.shapes, **self.shapes}
            self._check_adapters(folder, model)

    def _check_adapters(self, folder: Path, model: Path) -> None:
        """Refuse a base that some adapter does not fit.

        Raises:
            ModelLoadError: It lacks the layer, or has it in another shape.
        """
        for path in sorted(self._adapted):
            rows, columns = (
                self._reader.shape(_PARAMETER + path + part)[side]
                for part, side in ((_B, 0), (_A, 1))
            )
            found = self.shapes.get(f"{path}.weight")
            if found != (rows, columns):
                has = "none" if found is None else f"one of shape {list(found)}"
                raise ModelLoadError(
                    f"the training state {folder} has an adapter for {path}.weight of "
                    f"shape {[rows, columns]}, and its base {model} has {has}; give "
                    "the folder of the model that was trained"
                )

    def read(self, name: str) -> Tensor:
        """Return one whole weight in float32."""
        shape = self.shapes[name]
        if name in self._names:
            value = self._whole(self._names[name], shape)
        else:
            assert self._base is not None
            value = self._base.read(name, torch.Size(shape))
        path = name.removesuffix(".weight")
        if path in self._adapted:
            a = self._whole(path + _A)
            value = value.add(self._whole(path + _B) @ a, alpha=self._scale)
        return value

    def _whole(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        name = _PARAMETER + name
        value = torch.empty(self._reader.shape(name) if shape is None else shape)
        self._reader.read_into(name, value)
        return value


def _scale(folder: Path, adapter: Path | None) -> float:
    """Return the factor of the product of an adapter's matrices."""
    # Not in the state, which has tensors only; a checkpoint has it beside its weights.
    place = adapter or folder.parent / "weights" / "adapter"
    file = place / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
        return float(config["lora_alpha"] / rank)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the training state {folder} holds adapters, which are merged by the "
            f"adapter_config.json beside them: {file} cannot be read ({error!r}); give "
            "the folder of the adapter"
        ) from error


def _copy_configuration(model: Path, output: Path, precision: str) -> None:
    for name in _CONFIGS:
        if (model / name).is_file():
            shutil.copyfile(model / name, output / name)
    copy_tokenizer_files(model, output)
    file = output / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "dtype": precision}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write(file: Path, state: _State, precision: str) -> None:
    """Write safetensors: the length of a header, the header, and the numbers."""
    # By hand, because the library's `save_file` takes all tensors at once.
    dtype = getattr(torch, precision)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(state.shapes.items()):
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _TAGS[precision],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format aligns its data to 8 bytes by spaces after the header.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for value in _values(state, dtype):
            stream.write(value.flatten().view(torch.uint8).numpy().tobytes())
        stream.flush()
        # Before the rename, which could otherwise outlive the data in a power failure.
        os.fsync(stream.fileno())


def _values(state: _State, dtype: torch.dtype) -> Iterator[Tensor]:
    for name in sorted(state.shapes):
        yield state.read(name).to(dtype).contiguous()
