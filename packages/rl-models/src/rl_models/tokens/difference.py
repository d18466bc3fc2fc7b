"""Comparison of two tokenizers on many kinds of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["tokenizer_difference"]

_TEXTS = (
    *map(chr, range(9, 127)),
    "",
    " a  b\n\n c\t\r\n",
    "The quick brown fox, isn't it? 12345 + 678 = 13,023.",
    "x9y2z1=",
    # Composed and decomposed letters reveal different normalizers.
    "\u00e9 e\u0301 \u00df \u0130 \ufb01",
    "\u4f60\u597d\u3001\u4e16\u754c \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\u200d\u2764\ufe0f \x00 \u2028",
    "def f(x):\n    return {'a': [x ** 2]}\n",
)
_IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")


def tokenizer_difference(first: Any, second: Any) -> str | None:
    """Return the first difference that texts of many kinds show, in words.

    Compared are the tokens of texts, with and without special tokens added, the texts
    of tokens, the ids of special tokens and the chat template.

    Args:
        first: A tokenizer.
        second: Another one.

    Returns:
        None where no difference was found.
    """
    for name in (*_IDS, "chat_template"):
        values = getattr(first, name, None), getattr(second, name, None)
        if values[0] != values[1]:
            return f"{name} is {values[0]!r} and {values[1]!r}"
    if len(first) != len(second):
        return f"there are {len(first)} and {len(second)} tokens"
    for text in _texts(first):
        for added in (False, True):
            ids, others = (
                tokenizer(text, add_special_tokens=added)["input_ids"]
                for tokenizer in (first, second)
            )
            if ids != others:
                return f"the text {text!r} becomes the tokens {ids} and {others}"
        for skipped in (False, True):
            shown, other = (
                tokenizer.decode(ids, skip_special_tokens=skipped)
                for tokenizer in (first, second)
            )
            if shown != other:
                return f"the tokens {ids} become the text {shown!r} and {other!r}"
    return None


def _texts(tokenizer: Any) -> Iterator[str]:
    yield from _TEXTS
    for token in tokenizer.all_special_tokens:
        yield f"a{token} {token}b"
