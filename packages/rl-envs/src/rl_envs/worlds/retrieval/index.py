"""`Bm25Index`: documents ranked by the words that they share with a query."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from rl_distributed.errors import ConfigError
from rl_envs.worlds.retrieval.corpus import Document

__all__ = ["Bm25Index"]

_WORD = re.compile(r"\w+")


class Bm25Index:
    """An index of documents; titles count like text.

    Args:
        documents: What to index.

    Raises:
        ConfigError: The package bm25s is missing.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        try:
            import bm25s  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                "environment 'retrieval' needs bm25s, which is not installed; install "
                "rl-envs[retrieval]"
            ) from None
        self._documents = list(documents)
        self._ranking = bm25s.BM25()
        self._ranking.index(
            [_words(f"{each.title} {each.text}") for each in self._documents],
            show_progress=False,
        )

    def search(self, query: str, num_results: int) -> list[Document]:
        """Return the best documents that share a word with a query, best first.

        Args:
            query: Words to look for.
            num_results: Maximum number of documents.
        """
        words = _words(query)
        if not words:
            return []
        scores = np.asarray(self._ranking.get_scores(words))
        # Stable, so that documents of one score keep their order on every machine.
        best = np.argsort(-scores, kind="stable")[:num_results]
        # A score of 0 means that no word is shared.
        return [self._documents[place] for place in best if scores[place] > 0.0]


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
