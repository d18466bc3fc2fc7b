r"""Extraction of a multiple-choice letter from responses in some thirty languages.

The last letter counts that is in `\boxed{}`, or stands alone shortly after the word for
"answer" in one of the languages (`choices.toml`). Full-width and circled letters and
those of other scripts stand for Latin ones.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["canonical_choice", "find_choice", "find_english_choice"]

_UPRIGHT = r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf))\{"
_BOXED = rf"\\boxed\{{\s*(?:{_UPRIGHT})?\(?"
# "Answer: B", "**Answer**: $\boxed{B}$", "the answer is (B)", "the answer is: B".
_ENGLISH = re.compile(
    r"(?:answer[*_]*\s*(?:is\b\s*:?|:)\s*[*_$\s(]*"
    rf"(?:\\boxed\{{|{_UPRIGHT})*|{_BOXED})\(?([A-Z])\b",
    re.IGNORECASE,
)
# Punctuation and words between "answer" and its letter, all on one line.
_GAP = r"[^\n]{0,40}?"


def find_english_choice(response: str) -> str | None:
    """Return the Latin letter of the last answer, or None."""
    letters = _ENGLISH.findall(response)
    return letters[-1].upper() if letters else None


def find_choice(response: str) -> str | None:
    """Return the Latin letter of the last answer in any of the languages, or None."""
    pattern, _ = _patterns()
    found = pattern.findall(unicodedata.normalize("NFKC", response))
    return canonical_choice(found[-1]) if found else None


def canonical_choice(letter: str) -> str:
    """Return the Latin letter for one of any script, possibly in brackets."""
    _, letters = _patterns()
    text = unicodedata.normalize("NFKC", letter).strip().strip("().").upper()
    return letters.get(text, text)


@cache
def _patterns() -> tuple[re.Pattern[str], dict[str, str]]:
    text = Path(__file__).with_name("choices.toml").read_text(encoding="utf-8")
    data: dict[str, Any] = tomllib.loads(text)
    words = {_normal(word) for language in data["words"].values() for word in language}
    letters = {
        _normal(letter): latin
        for script in data["letters"].values()
        for letter, latin in script.items()
    }
    # The longest first, since one word may begin with another.
    cues = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    others = "|".join(re.escape(letter) for letter in letters)
    # A standalone letter: not within a word, and without marks that change it.
    alone = rf"(?<![^\W\d_])(?:{others})(?![^\W\d_]|{_marks()})"
    latin = r"(?<![A-Za-z\u00c0-\u024f])[A-J](?![A-Za-z\u00c0-\u024f'])"
    choice = f"({latin}|{alone})"
    # Words in any case, but letters in upper case: a single "a" is usually a word.
    return re.compile(f"(?:(?i:{cues}){_GAP}|{_BOXED}){choice}"), letters


def _marks() -> str:
    """Return a class of combining marks for the letters above."""
    spans = ("\\u0300-\\u036f", "\\u05b0-\\u05c7", "\\u064b-\\u0655", "\\u0901-\\u0903")
    more = ("\\u093c-\\u094d", "\\u0981-\\u0983", "\\u09bc-\\u09cd")
    return f"[{''.join((*spans, *more))}]"


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)
