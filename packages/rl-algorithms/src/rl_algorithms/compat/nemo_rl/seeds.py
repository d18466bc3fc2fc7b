"""The seeds of a process."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["set_seed"]

_NUMPY_SEEDS = 2**32


def set_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on all devices.

    Runs of this project do not use them: each part derives its own from the key `seed`.
    """
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
