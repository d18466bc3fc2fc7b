"""Model folders that servers load: one per version of the weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_models.checkpoint.model_folder import read_model_config
from rl_models.tokens.tokenizer_files import save_tokenizer

__all__ = ["ModelFolders"]

_SHARD_BYTES = 256 << 20
_INDEX = "model.safetensors.index.json"


class ModelFolders:
    """Writes Hugging Face folders with other weights of one model.

    Args:
        root: Target folder, created if missing. None: a temporary folder.
        model_name: Folder or hub name of the model, for its config.
        tokenizer_name: The same for its tokenizer.
        hf_config_overrides: Fields of the model's config that are replaced.
    """

    def __init__(
        self,
        root: str | None,
        model_name: str,
        tokenizer_name: str | None,
        hf_config_overrides: Mapping[str, Any] | None,
    ) -> None:
        self._is_own = root is None
        self.root = Path(
            tempfile.mkdtemp(prefix="rl-weights-") if root is None else root
        )
        self._model_name = model_name
        self._tokenizer_name = tokenizer_name or model_name
        self._overrides = dict(hf_config_overrides or {})
        self._served: Path | None = None

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> Path:
        """Write weights as they arrive, holding no more than a shard of them.

        Args:
            tensors: By their Hugging Face names; read to its end.
            version: Number of the weights.

        Returns:
            The complete folder.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        folder = Path(
            tempfile.mkdtemp(prefix=f"version_{version}_", dir=self.root)
        ).resolve()
        # `mkdtemp` makes it private, but servers may run as other users.
        folder.chmod(0o755)
        try:
            self._write_into(folder, tensors)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _write_into(
        self, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        files: dict[str, str] = {}
        held: dict[str, torch.Tensor] = {}
        total = size = number = 0

        def flush() -> None:
            nonlocal size, number
            if held:
                number += 1
                file = f"model-{number:05d}.safetensors"
                save_file(held, folder / file, metadata={"format": "pt"})
                files.update(dict.fromkeys(held, file))
                held.clear()
                size = 0

        for name, tensor in tensors:
            # A copy, because the stream reuses its memory for later tensors.
            held[name] = tensor.detach().cpu().contiguous().clone()
            size += held[name].nbytes
            total += held[name].nbytes
            if size >= _SHARD_BYTES:
                flush()
        flush()
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        config = {**self._config(), **self._overrides}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_tokenizer(self._tokenizer_name, None, folder)

    def _config(self) -> dict[str, Any]:
        found = read_model_config(self._model_name)
        if found is None:
            from transformers import AutoConfig  # noqa: PLC0415

            found = AutoConfig.from_pretrained(self._model_name).to_dict()
        return dict(found)

    def serve(self, folder: Path) -> None:
        """Keep the folder that is served now, and remove the previous one."""
        before, self._served = self._served, folder
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def remove(self, folder: Path) -> None:
        """Remove a folder that was not served."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders; servers have the weights in memory."""
        if self._served is not None:
            shutil.rmtree(self._served, ignore_errors=True)
        if self._is_own:
            shutil.rmtree(self.root, ignore_errors=True)
