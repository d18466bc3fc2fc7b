"""Seeds as pure functions of their purpose.

`mix(a, b, c, ...)` folds 64-bit integers with the finalizer of splitmix64 (Steele, Lea
and Flood, 2014). It works on numpy arrays, gives the same result on each platform and
version, and needs no generator whose state would have to be saved.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix", "permutation", "row_seeds", "splitmix64"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BITS = 0xFFFFFFFFFFFFFFFF


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers; a bijection."""
    # Arithmetic modulo 2^64 is intended, and numpy warns of it for scalars.
    with np.errstate(over="ignore"):
        z = values + _GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def mix(*parts: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Fold integers and arrays of integers (broadcast together) into 64 bits."""
    shapes = {part.shape for part in parts if not isinstance(part, int)}
    if shapes == {(1,)}:
        # The seed of a single row, asked for at each turn: plain integers take a tenth
        # of the time of arrays.
        plain = (part if isinstance(part, int) else int(part[0]) for part in parts)
        return np.array([_mix_integers(plain)], np.uint64)
    state = np.zeros((), np.uint64)
    for part in parts:
        # Two's complement, so that negative numbers work as well.
        bits = (
            np.array(part & 0xFFFFFFFFFFFFFFFF, np.uint64)
            if isinstance(part, int)
            else part.astype(np.int64).view(np.uint64)
        )
        state = splitmix64(np.asarray(state ^ bits))
    return state


def _mix_integers(parts: Iterable[int]) -> int:
    """Return `mix` of plain integers."""
    state = 0
    for part in parts:
        z = ((state ^ (part & _BITS)) + 0x9E3779B97F4A7C15) & _BITS
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        state = z ^ (z >> 31)
    return state


def permutation(num_rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of `num_rows` rows in an epoch."""
    # Sorting random keys, unlike a shuffle, needs no state and gives every row its key
    # independently of the others.
    keys = mix(seed, epoch, np.arange(num_rows, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


def row_seeds(
    seed: int,
    step: int,
    prompt_index: NDArray[np.int64],
    sample_index: NDArray[np.int64],
    turn: int = 0,
) -> NDArray[np.int64]:
    """Return the sampling seed of each row, not negative.

    It is `mix(seed, step, prompt_index, sample_index, turn)` without its top bit, so it
    does not depend on the batch, the number of replicas or what was sampled before.
    """
    seeds = mix(seed, step, prompt_index, sample_index, turn)
    # Torch and samplers take signed seeds and refuse negative ones.
    return (seeds >> np.uint64(1)).astype(np.int64)
