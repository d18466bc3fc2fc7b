"""Texts of a configuration that may be read from files."""

from __future__ import annotations

from pathlib import Path

from rl_algorithms.data.config import DataConfig
from rl_algorithms.errors import DatasetNotFoundError

__all__ = ["check_text_files", "text_or_file"]


def text_or_file(text: str | None, file: str | None, key: str) -> str | None:
    """Return a text, or the content of a file.

    Args:
        text: The text; None: see `file`.
        file: The file; None: the text.
        key: The key of section `data` that names the file.

    Raises:
        DatasetNotFoundError: The file cannot be read.
    """
    if file is None:
        return text
    try:
        # Some editors begin a file with a mark, which would be a part of each prompt.
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise DatasetNotFoundError(
            f"data.{key}: cannot read {file!r}: {reason}; correct the path"
        ) from error


def check_text_files(config: DataConfig) -> None:
    """Check that the files of templates and system prompts can be read.

    Raises:
        DatasetNotFoundError: A file cannot be read.
    """
    text_or_file(None, config.prompt_file, "prompt_file")
    text_or_file(None, config.system_prompt_file, "system_prompt_file")
