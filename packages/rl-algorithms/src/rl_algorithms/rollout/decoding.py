"""Decoding of sampled tokens into the text that environments judge.

Shapes: M rows, S tokens wide.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl_algorithms.data.types import Tokenizer

__all__ = ["decode_answers"]

# Rows decoded at a time. The lists of all tokens of a large step would make Python's
# garbage collector traverse everything that the program holds, several times.
_ROWS = 2048


def decode_answers(
    tokenizer: Tokenizer,
    tokens: Tensor,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> list[str]:
    """Decode the sampled tokens of rows, skipping special tokens.

    Args:
        tokenizer: The policy's tokenizer.
        tokens: [M, S].
        starts: [M] position of the first sampled token of each row.
        ends: [M] position after the last one.
    """
    texts: list[str] = []
    ids = tokens.cpu().numpy()
    for first in range(0, len(ids), _ROWS):
        rows = slice(first, first + _ROWS)
        texts += _decode(tokenizer, ids[rows], starts[rows], ends[rows])
    return texts


def _decode(
    tokenizer: Tokenizer,
    tokens: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> list[str]:
    """Decode some rows.

    A fast tokenizer's own engine decodes a batch several times faster than its Python
    wrapper. The results differ only if the wrapper cleans up spaces afterwards.
    """
    rows = _lists(tokens, starts, ends)
    engine = getattr(tokenizer, "backend_tokenizer", None)
    if engine is not None and not getattr(
        tokenizer, "clean_up_tokenization_spaces", False
    ):
        decoded: list[str] = engine.decode_batch(rows, skip_special_tokens=True)
        return decoded
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def _lists(
    tokens: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> list[list[int]]:
    """Return the sampled tokens of each row."""
    if len(tokens) == 1:
        # Of a conversation that is played by itself: a slice is faster than a mask.
        return [tokens[0, int(starts[0]) : int(ends[0])].tolist()]
    position = np.arange(tokens.shape[1])
    is_sampled = (position >= starts[:, None]) & (position < ends[:, None])
    flat = tokens[is_sampled].tolist()
    borders = itertools.pairwise([0, *(ends - starts).cumsum(0).tolist()])
    return [flat[a:b] for a, b in borders]
