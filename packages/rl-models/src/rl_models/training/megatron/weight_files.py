"""Safetensors of a model folder or a hub name, read one tensor at a time."""

from __future__ import annotations

import json
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
        for file in self._all_files():
            with safe_open(file, framework="pt") as tensors:
                self._files.update(dict.fromkeys(tensors.keys(), file))

    def _all_files(self) -> list[Path]:
        if not Path(self.source).is_dir():
            check_hub_name(self.source)
        index = self._find(SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            single = self._find(SAFE_WEIGHTS_NAME)
            if single is None:
                raise ModelLoadError(
                    f"the model {self.source!r} has no {SAFE_WEIGHTS_NAME}, which the "
                    "training backend 'megatron' reads; write one by save_pretrained"
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
        file = self._files.get(name)
        if file is None:
            raise ModelLoadError(
                f"the model {self.source!r} has no tensor {name}; give the folder of a "
                "model whose config.json fits its weights"
            )
        with safe_open(file, framework="pt") as tensors:
            value: Tensor = tensors.get_tensor(name)
        if value.shape != shape:
            raise ModelLoadError(
                f"the tensor {name} of {self.source!r} must have the shape "
                f"{tuple(shape)} that config.json says: got {tuple(value.shape)}"
            )
        return value.float()
