"""Exact feedback of mastermind, and guesses consistent with it.

Shapes: C codes, G guesses, L symbols in a code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_CODES",
    "SYMBOLS",
    "Feedback",
    "consistent_codes",
    "feedback_of",
    "next_guess",
]

SYMBOLS = "123456789"
MAX_CODES = 10_000
"""Maximum number of codes of a game, since the solver lists them all."""
# Comparing every code with every other would take 10,000 squared steps.
_MAX_COMPARED = 64


class Feedback(NamedTuple):
    """Feedback on a guess."""

    exact: int
    """Number of symbols in their place."""
    misplaced: int
    """Number of further symbols that occur elsewhere, each counted once."""


def feedback_of(guess: str, secret: str) -> Feedback:
    """Compare a guess with a secret of the same length."""
    exact = sum(a == b for a, b in zip(guess, secret, strict=True))
    shared = (Counter(guess) & Counter(secret)).total()
    return Feedback(exact, shared - exact)


@lru_cache(maxsize=8)
def _all_codes(length: int, num_symbols: int) -> NDArray[np.int8]:
    """Return all codes, [C, L], in lexical order; symbols are 0, 1, ..."""
    codes = np.array(list(product(range(num_symbols), repeat=length)), dtype=np.int8)
    # All callers share the cached array.
    codes.setflags(write=False)
    return codes


def _as_numbers(code: str) -> NDArray[np.int8]:
    return np.array([SYMBOLS.index(symbol) for symbol in code], dtype=np.int8)


def _as_text(code: NDArray[np.int8]) -> str:
    return "".join(SYMBOLS[symbol] for symbol in code)


def _feedback_numbers(
    guesses: NDArray[np.int8], codes: NDArray[np.int8], num_symbols: int
) -> NDArray[np.int64]:
    """Return [G, C] numbers that are equal if and only if the feedback is."""
    exact = (guesses[:, None, :] == codes[None, :, :]).sum(2)
    shared = np.zeros_like(exact)
    for symbol in range(num_symbols):
        shared += np.minimum(
            (guesses == symbol).sum(1)[:, None], (codes == symbol).sum(1)[None, :]
        )
    # Two digits of a number in base L + 1: one comparison in place of two.
    return np.asarray(exact * (codes.shape[1] + 1) + shared - exact, dtype=np.int64)


def _consistent(
    history: Sequence[tuple[str, Feedback]], length: int, num_symbols: int
) -> NDArray[np.int8]:
    codes = _all_codes(length, num_symbols)
    for guess, (exact, misplaced) in history:
        told = exact * (length + 1) + misplaced
        found = _feedback_numbers(_as_numbers(guess)[None], codes, num_symbols)[0]
        codes = codes[found == told]
    return codes


def consistent_codes(
    history: Sequence[tuple[str, Feedback]], length: int, num_symbols: int
) -> list[str]:
    """Return all codes consistent with the feedback, in lexical order.

    Args:
        history: Guesses and their feedback.
        length: Number of symbols in a code.
        num_symbols: Number of `SYMBOLS` in use.
    """
    return [_as_text(code) for code in _consistent(history, length, num_symbols)]


def next_guess(
    history: Sequence[tuple[str, Feedback]], length: int, num_symbols: int
) -> str:
    """Return a consistent code that leaves few others in the worst case.

    Among up to 64 consistent codes, evenly spread, it is the first whose most frequent
    feedback is rarest. As guesses are always consistent, each wrong one rules out at
    least itself, so the secret is eventually found.

    Args:
        history: Guesses and their feedback.
        length: Number of symbols in a code.
        num_symbols: Number of `SYMBOLS` in use.

    Raises:
        ValueError: No code is consistent with the feedback.
    """
    codes = _consistent(history, length, num_symbols)
    if not len(codes):
        raise ValueError(
            f"history must come from one secret: no code of {length} symbols fits "
            f"{list(history)}"
        )
    # Rounded up, so that never more than the maximum are compared.
    step = -(-len(codes) // _MAX_COMPARED)
    compared = codes[::step]
    worst = [
        int(np.unique(row, return_counts=True)[1].max())
        for row in _feedback_numbers(compared, codes, num_symbols)
    ]
    return _as_text(compared[int(np.argmin(worst))])
