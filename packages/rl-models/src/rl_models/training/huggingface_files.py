"""Write model folders that plain transformers reads: config and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rl_distributed.errors import CheckpointError
from rl_models.config import PolicyConfig
from rl_models.ops.causal_lm import DTYPES
from rl_models.training.checkpoint_tokenizer import save_tokenizers

__all__ = ["save_model_folder", "save_whole_model"]


def save_whole_model(
    model: Any,
    tensors: Iterable[tuple[str, Tensor]],
    config: PolicyConfig,
    weights_path: str | PathLike[str],
    tokenizer_path: str | PathLike[str] | None,
    *,
    is_first: bool,
) -> None:
    """Write the model folder of a checkpoint, and the policy's tokenizer.

    Every rank must call it, because gathering a tensor takes all of them.

    Args:
        model: See `save_model_folder`.
        tensors: Whole tensors under the model's names, tied ones once.
        config: The policy's config.
        weights_path: Folder of the model; the tokenizer is saved there too.
        tokenizer_path: A further folder for the tokenizer.
        is_first: Whether this rank keeps the tensors and writes.

    Raises:
        CheckpointError: A folder cannot be written.
    """
    whole = {}
    for name, value in tensors:
        if is_first:
            whole[name] = value
    if is_first:
        save_model_folder(model, whole, Path(weights_path), config.precision)
        save_tokenizers(config, weights_path, tokenizer_path)


def save_model_folder(
    model: Any, state: Mapping[str, Tensor], folder: Path, precision: str
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` reads.

    Args:
        model: The model whose config is written; its own weights are ignored.
        state: Whole tensors under the model's names, tied ones once.
        folder: Target folder, created if missing.
        precision: Data type of the weights in the file.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    dtype = DTYPES[precision]
    weights = {
        name: value.detach().to("cpu", dtype) if value.is_floating_point() else value
        for name, value in state.items()
    }
    try:
        model.save_pretrained(folder, state_dict=weights)
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        # transformers writes the type of the model in memory, which is float32 to
        # train.
        config["dtype"] = precision
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the model to {folder}: {error}; free disk space or choose "
            "another checkpoint_dir"
        ) from error
