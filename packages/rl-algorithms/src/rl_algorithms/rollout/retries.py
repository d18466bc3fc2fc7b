"""`RetryPolicy`: which conversations of a rollout are played again.

Shapes: N rows; rows of a prompt share a group index.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rl_algorithms.rollout.config import RetryConfig
from rl_algorithms.rollout.result import Outcome

__all__ = ["ConfiguredRetry", "RetryPolicy"]


class RetryPolicy(Protocol):
    """Decides after each attempt what is played again; groups stay whole either way."""

    def rows_to_resample(
        self, outcome: Tensor, group_index: Tensor, attempt: int, elapsed_s: float
    ) -> Tensor:
        """Return the indices of the rows to play again, in order; none ends it.

        Args:
            outcome: [N] of `Outcome`.
            group_index: [N].
            attempt: How many attempts there were; 1 after the first.
            elapsed_s: Seconds since the first began.
        """
        ...


class ConfiguredRetry:
    """Plays rows of some outcomes again, so often and so long.

    Args:
        config: The settings.
    """

    def __init__(self, config: RetryConfig | None = None) -> None:
        self.config = config if config is not None else RetryConfig()
        self._outcomes = torch.tensor(
            [int(Outcome[name.upper()]) for name in self.config.outcomes],
            dtype=torch.int8,
        )

    def rows_to_resample(
        self, outcome: Tensor, group_index: Tensor, attempt: int, elapsed_s: float
    ) -> Tensor:
        """See `RetryPolicy`."""
        config = self.config
        late = config.deadline_s is not None and elapsed_s >= config.deadline_s
        if attempt >= config.max_attempts or late:
            return torch.zeros(0, dtype=torch.int64)
        again = torch.isin(outcome, self._outcomes)
        if config.resample == "group":
            again = torch.isin(group_index, group_index[again])
        return again.nonzero().flatten()
