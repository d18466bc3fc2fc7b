"""The weights of a model folder, as other processes load and verify them.

The server reads the folder once and records name, data type, shape and digest of every
tensor. Each replica reads the files itself and compares: this finds bytes that change
or vanish in between, and files that another node sees differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rl_distributed.transfer.manifest import TensorEntry, digest_of, dtype_name
from rl_models.checkpoint.model_folder import check_model_folder, read_model_config
from rl_models.errors import ModelLoadError, WeightSyncError

__all__ = ["FolderWeights", "ModelShape", "verified_tensors"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Fields that say how a folder was made, and not what the model computes.
_CONFIG_NOTES = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_SHOWN = 5


@dataclass(frozen=True)
class FolderWeights:
    """All tensors of a folder of safetensors."""

    folder: str
    entries: tuple[tuple[str, TensorEntry], ...]
    """File and tensor, in the order in which they are loaded."""

    @classmethod
    def read(cls, folder: str | Path) -> FolderWeights:
        """Read the whole folder and record its digests.

        Raises:
            ModelLoadError: Files are missing, cut off or not what the index says.
        """
        path = Path(folder).resolve()
        entries = tuple(
            (file, _entry(name, tensor))
            for file in _files(path)
            for name, tensor in _tensors(path / file)
        )
        _check_index(path, entries)
        return cls(str(path), entries)

    def to_plain(self) -> list[tuple[str, list[Any]]]:
        """Return the entries as values that any process can read."""
        return [(file, entry.to_json()) for file, entry in self.entries]


@dataclass(frozen=True)
class ModelShape:
    """The config and shapes that weights need to fit the served model."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: str | Path) -> ModelShape:
        """Return the shape of a model folder, from the heads of its files.

        Raises:
            ModelLoadError: The folder holds no safetensors, or a file is cut off.
        """
        path = Path(folder)
        shapes = {
            name: shape for file in _files(path) for name, shape in _shapes(path / file)
        }
        return cls(_essence(read_model_config(folder)), shapes)

    def check(self, weights: FolderWeights) -> None:
        """Refuse weights of another model.

        Raises:
            ModelLoadError: Something differs; the message names it.
        """
        # The config too: with equal shapes, another number of heads or another base of
        # the rotary embedding is another model.
        config = _essence(read_model_config(weights.folder))
        keys = sorted({*config, *self.config})
        problems = [
            f"config.json has {key} {config.get(key)!r} instead of "
            f"{self.config.get(key)!r}"
            for key in keys
            if config.get(key) != self.config.get(key)
        ]
        found = {entry.name: entry.shape for _, entry in weights.entries}
        problems += [f"{name} is missing" for name in self.shapes if name not in found]
        problems += [f"{name} is unknown" for name in found if name not in self.shapes]
        problems += [
            f"{name} has shape {list(shape)} instead of {list(self.shapes[name])}"
            for name, shape in found.items()
            if self.shapes.get(name, shape) != shape
        ]
        if problems:
            more = "; ..." if len(problems) > _SHOWN else ""
            raise ModelLoadError(
                f"{weights.folder} does not fit the model that is served: "
                f"{'; '.join(problems[:_SHOWN])}{more}. Nothing was loaded."
            )


def verified_tensors(
    folder: str, entries: list[tuple[str, list[Any]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors of a folder, each compared with what it should be.

    Args:
        folder: The folder, as this process sees it.
        entries: `FolderWeights.to_plain()`.

    Raises:
        WeightSyncError: A tensor is missing or not the one that was noted.
    """
    path = Path(folder)
    by_file: dict[str, list[TensorEntry]] = {}
    for file, values in entries:
        by_file.setdefault(file, []).append(TensorEntry.from_json(values))
    for file, wanted in by_file.items():
        try:
            with safe_open(path / file, framework="pt") as opened:
                for entry in wanted:
                    tensor = opened.get_tensor(entry.name)
                    if _entry(entry.name, tensor) != entry:
                        raise WeightSyncError(
                            f"{entry.name} in {path / file} has changed since the "
                            "update began; write to another folder, and send it again"
                        )
                    yield entry.name, tensor
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{path / file} cannot be read: {error}") from error


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    digest = digest_of(data)
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest)


def _files(path: Path) -> list[str]:
    """Return the files of a model folder, by name."""
    check_model_folder(path)
    index = _index(path)
    names = sorted(set(index.values())) if index else [_SINGLE]
    for name in names:
        # An index could name files outside the folder.
        if "/" in name or not (path / name).is_file():
            raise ModelLoadError(
                f"the model folder {path} has no file {name}; give a folder with "
                f"{_SINGLE}, or with all files that {_INDEX} names"
            )
    return names


def _index(path: Path) -> dict[str, str]:
    if not (path / _INDEX).is_file():
        return {}
    try:
        record = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in record["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path / _INDEX} is damaged: {error!r}") from error


def _check_index(path: Path, entries: tuple[tuple[str, TensorEntry], ...]) -> None:
    index = _index(path)
    found = {entry.name for _, entry in entries}
    missing = sorted(set(index) - found)
    if missing:
        raise ModelLoadError(
            f"the files of {path} lack {len(missing)} tensors that {_INDEX} names, "
            f"such as {missing[0]}"
        )


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, tuple(opened.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _essence(config: dict[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (config or {}).items() if k not in _CONFIG_NOTES}
