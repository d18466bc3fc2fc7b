"""The tokenizer that a checkpoint of a policy holds."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from rl_models.config import PolicyConfig
from rl_models.tokens.tokenizer_files import save_tokenizer

__all__ = ["save_tokenizers"]


def save_tokenizers(
    config: PolicyConfig,
    weights_path: str | PathLike[str],
    tokenizer_path: str | PathLike[str] | None,
) -> None:
    """Save the policy's tokenizer with its weights, and in a folder of its own if any.

    Raises:
        CheckpointError: A folder cannot be written.
    """
    source = config.tokenizer.name or config.model_name
    for target in {Path(weights_path), Path(tokenizer_path or weights_path)}:
        save_tokenizer(source, config.tokenizer.chat_template, target)
