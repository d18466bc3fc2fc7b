"""Which files of a model folder belong to its tokenizer, and a copy of them."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["TOKENIZER_FILES", "copy_tokenizer_files"]

TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*",
)
"""Patterns of their names."""


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copy the files of a folder that belong to its tokenizer, if it has any.

    Args:
        source: A model folder, or one with tokenizer files.
        folder: Target folder.

    Raises:
        OSError: A file cannot be read or written.
    """
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                target = folder / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                # Without the mode: the copy of a read-only file must be writable.
                shutil.copyfile(file, target)
