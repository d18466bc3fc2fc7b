"""`RowNames`: which conversation each row is, and so the seeds it is sampled with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_algorithms.seeds import row_seeds

__all__ = ["RowNames"]

# Seeds of the sample index: `attempt * this` makes room for all rows of a prompt. A row
# has the same seed in whatever batch, on whatever replica and after whatever crash.
_ATTEMPT = 1 << 32


@dataclass(frozen=True, slots=True)
class RowNames:
    """Which conversation each of N rows is, whatever batch it is played in."""

    prompt: NDArray[np.int64]
    """[N] place of the prompt in the batch."""
    sample: NDArray[np.int64]
    """[N] place among the conversations of the prompt."""
    attempt: NDArray[np.int64]
    """[N] how often it was played with another seed before."""

    @classmethod
    def of_groups(cls, num_prompts: int, num_generations: int) -> RowNames:
        """Name all rows of whole groups, in order."""
        return cls(
            np.repeat(np.arange(num_prompts), num_generations),
            np.tile(np.arange(num_generations), num_prompts),
            np.zeros(num_prompts * num_generations, np.int64),
        )

    def select(self, rows: NDArray[np.int64]) -> RowNames:
        """Return the names of some rows."""
        return RowNames(self.prompt[rows], self.sample[rows], self.attempt[rows])

    def next_attempt(self, again: NDArray[np.bool_]) -> RowNames:
        """Return names with another seed for some rows."""
        return replace(self, attempt=self.attempt + again)

    def seeds(self, seed: int, step: int, first_prompt: int, turn: int) -> Tensor:
        """Return [N] sampling seeds of a turn."""
        sample = self.sample + self.attempt * _ATTEMPT
        return torch.from_numpy(
            row_seeds(seed, step, self.prompt + first_prompt, sample, turn)
        )
