"""Comparison of short answers: exact match and F1, as SQuAD defines them.

The definitions, with their normalisation, are those of Rajpurkar et al., 2016
(https://arxiv.org/abs/1606.05250) and its evaluation script.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

__all__ = ["exact_match", "f1_score", "normalized"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and extra blanks."""
    lowered = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(c for c in lowered if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def exact_match(response: str, answers: Sequence[str]) -> float:
    """Return 1 if a response equals one of the answers after normalisation, else 0."""
    found = normalized(response)
    # An empty response would equal an answer of articles and punctuation only.
    return float(bool(found) and any(found == normalized(a) for a in answers))


def f1_score(response: str, answers: Sequence[str]) -> float:
    """Return the best F1 of the words of a response with those of an answer."""
    return max((_f1(response, answer) for answer in answers), default=0.0)


def _f1(response: str, answer: str) -> float:
    found, wanted = normalized(response).split(), normalized(answer).split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
