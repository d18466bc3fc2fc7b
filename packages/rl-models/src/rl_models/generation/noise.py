"""Uniform noise that is a function of (seed of the row, index of the new token).

Rows do not take turns on a stream of random numbers, so a row's sample does not depend
on the rows beside it, on their order, or on the number of replicas. The function is the
finaliser of splitmix64, applied twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["derive_seeds", "noise_streams", "uniform_noise"]

UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
# With 22 bits the largest value is far enough below 1 that u * total < total also holds
# in float32.
_BITS = 22
_SHIFT = np.uint64(64 - _BITS)


def _mix(state: UInt64Array) -> UInt64Array:
    state = (state ^ (state >> np.uint64(30))) * _FACTOR_1
    state = (state ^ (state >> np.uint64(27))) * _FACTOR_2
    return state ^ (state >> np.uint64(31))


def noise_streams(seeds: torch.Tensor) -> UInt64Array:
    """Return [B] the states from which the noise of rows is computed.

    Args:
        seeds: [B] int64, one per row.
    """
    return _mix(seeds.cpu().numpy().view(np.uint64) + _STRIDE)


def uniform_noise(streams: UInt64Array, index: IntArray) -> torch.Tensor:
    """Return noise for new tokens.

    Args:
        streams: Streams of rows; see `noise_streams`.
        index: Index of the new token of each; the shapes are broadcast.

    Returns:
        Float32 on the CPU, inside (0, 1).
    """
    mixed = _mix(streams + (index + 1).astype(np.uint64) * _STRIDE)
    high = (mixed >> _SHIFT).astype(np.float32)
    return torch.from_numpy((high + np.float32(0.5)) * np.float32(2.0**-_BITS))


def derive_seeds(seed: int, call: int, num_rows: int) -> torch.Tensor:
    """Return [num_rows] int64 seeds for rows that have none.

    Args:
        seed: The run's seed.
        call: Number of earlier calls.
        num_rows: Rows of this call.
    """
    # Mixed with the call, so that equal prompts get other answers in the next call.
    origin = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    calls = np.array([call], dtype=np.uint64)
    stream = _mix(_mix(origin + _STRIDE) + calls * _STRIDE)
    rows = np.arange(1, num_rows + 1, dtype=np.uint64) * _STRIDE
    return torch.from_numpy(_mix(stream + rows).view(np.int64))
