"""Units in which the length of a text is counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from rl_distributed.errors import ConfigError, MissingExtraError
from rl_envs.worlds.verdict import visible

__all__ = ["Counter", "counters", "words_of"]

Counter: TypeAlias = Callable[[str], int]
"""Function that returns the length of a text."""

_SENTENCE_END = re.compile(
    r"[.!?\u2026\u3002\uff01\uff1f]+[\"')\]\u201d\u2019]*(?=\s|\Z)"
)
_PUNCTUATION = ".,;:!?"


def counters(tokenizer_path: str | None) -> dict[str, Counter]:
    """Return the counter of each unit, by its name.

    Args:
        tokenizer_path: `tokenizer.json`, or a folder with it; None: tokens cannot be
            counted.

    Raises:
        ConfigError: It cannot be read.
        MissingExtraError: The package tokenizers is missing.
    """
    known: dict[str, Counter] = {
        "words": lambda text: len(words_of(text)),
        "characters": lambda text: len(" ".join(visible(text).split())),
        "sentences": _num_sentences,
    }
    if tokenizer_path is not None:
        tokenizer = _tokenizer(tokenizer_path)
        known["tokens"] = lambda text: len(
            # Special tokens are not part of the text.
            tokenizer.encode(text, add_special_tokens=False).ids
        )
    return known


def words_of(text: str) -> list[str]:
    """Return the words of a text, separated by blanks, with a letter or digit each.

    Punctuation around a word, such as a comma, does not belong to it.
    """
    parts = visible(text).split()
    return [p.strip(_PUNCTUATION) for p in parts if any(c.isalnum() for c in p)]


def _num_sentences(text: str) -> int:
    return sum(bool(words_of(part)) for part in _SENTENCE_END.split(text))


def _tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "the unit 'tokens' of environment 'length' needs the package tokenizers, "
            f"which is not installed ({error}); install tokenizers"
        ) from error
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        # The package raises plain exceptions only.
        raise ConfigError(
            f"tokenizer must be a tokenizer.json, or a folder with it: {path!r} "
            f"cannot be read: {error}"
        ) from error
