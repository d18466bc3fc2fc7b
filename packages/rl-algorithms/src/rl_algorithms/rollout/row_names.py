"""`RowNames`: the identity of each row, which determines its sampling seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_algorithms.seeds import row_seeds

__all__ = ["RowNames"]

# Offset between attempts in the sample index that seeds are made of, larger than any
# number of rows of a prompt. A row keeps its seed in any batch, on any replica and
# after any crash.
_ATTEMPT = 1 << 32


@dataclass(frozen=True, slots=True)
class RowNames:
    """Identities of N rows, independent of the batch that they are played in."""

    prompt: NDArray[np.int64]
    """[N] index of the prompt in the batch."""
    sample: NDArray[np.int64]
    """[N] index among the conversations of the prompt."""
    attempt: NDArray[np.int64]
    """[N] number of earlier attempts with other seeds."""

    @classmethod
    def of_groups(cls, num_prompts: int, num_generations: int) -> RowNames:
        """Return the identities of all rows of complete groups, in order."""
        return cls(
            np.repeat(np.arange(num_prompts), num_generations),
            np.tile(np.arange(num_generations), num_prompts),
            np.zeros(num_prompts * num_generations, np.int64),
        )

    def select(self, rows: NDArray[np.int64]) -> RowNames:
        """Return the identities of some rows."""
        return RowNames(self.prompt[rows], self.sample[rows], self.attempt[rows])

    def next_attempt(self, again: NDArray[np.bool_]) -> RowNames:
        """Return identities with new seeds where `again` is true."""
        return replace(self, attempt=self.attempt + again)

    def seeds(self, seed: int, step: int, first_prompt: int, turn: int) -> Tensor:
        """Return [N] sampling seeds of a turn."""
        sample = self.sample + self.attempt * _ATTEMPT
        return torch.from_numpy(
            row_seeds(seed, step, self.prompt + first_prompt, sample, turn)
        )

    def start_seeds(self, seed: int, step: int, first_prompt: int) -> Tensor:
        """Return [N] seeds with which environments begin; equal for a prompt's rows."""
        # A negative index of the sample, which no answer has.
        sample = np.full_like(self.sample, -1)
        return torch.from_numpy(
            row_seeds(seed, step, self.prompt + first_prompt, sample)
        )
