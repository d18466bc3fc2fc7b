"""Safetensors of a model folder or hub name, read one tensor or part at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.errors import ModelLoadError

__all__ = ["WeightFiles"]


class WeightFiles:
    """The tensors of a model by name.

    Args:
        source: A folder or a hub name.

    Raises:
        ModelLoadError: There are no safetensors.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = str(check_model_folder(source) or source)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        # From the files themselves and not from the index, which has no shapes and may
        # be missing.
        for file in self._all_files():
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    self._files[name] = file
                    self._shapes[name] = tuple(tensors.get_slice(name).get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return self._shapes

    def _all_files(self) -> list[Path]:
        if not Path(self.source).is_dir():
            check_hub_name(self.source)
        index = self._find(SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            single = self._find(SAFE_WEIGHTS_NAME)
            if single is None:
                raise ModelLoadError(
                    f"the model {self.source!r} has no {SAFE_WEIGHTS_NAME}, of "
                    "which tensors are read one at a time; write one by save_pretrained"
                )
            return [single]
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [self._find(name) for name in sorted(set(names))]
        return [file for file in files if file is not None]

    def _find(self, name: str) -> Path | None:
        found = cached_file(
            self.source,
            name,
            _raise_exceptions_for_missing_entries=False,
        )
        return None if found is None else Path(found)

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """Return a tensor in float32.

        Raises:
            ModelLoadError: It is missing, or has another shape.
        """
        return self.read_part(name, shape, (slice(None),) * len(shape))

    def read_part(
        self, name: str, shape: torch.Size, slices: tuple[slice, ...]
    ) -> Tensor:
        """Return a part of a tensor in float32; the rest of it is not read.

        Args:
            name: The tensor's name in the files.
            shape: Shape of the whole tensor.
            slices: The part.

        Raises:
            ModelLoadError: It is missing, or has another shape.
        """
        file = self._files.get(name)
        if file is None:
            raise ModelLoadError(
                f"the model {self.source!r} has no tensor {name}; give the folder of a "
                "model whose config.json fits its weights"
            )
        if self._shapes[name] != tuple(shape):
            raise ModelLoadError(
                f"the tensor {name} of {self.source!r} must have the shape "
                f"{tuple(shape)} that config.json says: got {self._shapes[name]}"
            )
        with safe_open(file, framework="pt") as tensors:
            if not shape:  # a scalar has no slices
                value: Tensor = tensors.get_tensor(name)
            else:
                value = tensors.get_slice(name)[slices]
        return value.float()
