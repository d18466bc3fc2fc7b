"""`RetryPolicy`: decides which conversations of a rollout are retried.

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
    """Selects rows to retry after each attempt; groups stay complete in any case."""

    def rows_to_resample(
        self, outcome: Tensor, group_index: Tensor, attempt: int, elapsed_s: float
    ) -> Tensor:
        """Return the indices of the rows to retry, in order; an empty tensor for none.

        Args:
            outcome: [N] of `Outcome`.
            group_index: [N].
            attempt: Number of attempts so far, 1 after the first.
            elapsed_s: Seconds since the first attempt began.
        """
        ...


class ConfiguredRetry:
    """Retries rows with certain outcomes, within a limit of attempts and time.

    Args:
        config: The settings.
    """

    def __init__(self, config: RetryConfig | None = None) -> None:
        self.config = config if config is not None else RetryConfig()
        self._outcomes = {int(Outcome[name.upper()]) for name in self.config.outcomes}

    def rows_to_resample(
        self, outcome: Tensor, group_index: Tensor, attempt: int, elapsed_s: float
    ) -> Tensor:
        """See `RetryPolicy`."""
        config = self.config
        late = config.deadline_s is not None and elapsed_s >= config.deadline_s
        is_over = attempt >= config.max_attempts or late
        found = outcome.tolist()
        # The usual case, and quick for a single row.
        if is_over or self._outcomes.isdisjoint(found):
            return torch.zeros(0, dtype=torch.int64)
        again = torch.tensor([each in self._outcomes for each in found])
        if config.resample == "group":
            again = torch.isin(group_index, group_index[again])
        return again.nonzero().flatten()
