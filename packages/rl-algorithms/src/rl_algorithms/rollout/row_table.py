"""How a rollout is played, and the table of rows that comes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_algorithms.rollout.versions import mark_stale
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import SamplingParams

if TYPE_CHECKING:
    from rl_distributed.timing.timer import Timer

__all__ = ["Play", "Table"]


@dataclass(frozen=True)
class Play:
    """The arguments of a rollout that all its attempts share."""

    seed: int
    step: int
    first_prompt_index: int
    greedy: bool
    sampling: SamplingParams | None
    timer: Timer | None
    begin_s: float = field(default_factory=time.monotonic)
    """When it began, by the monotonic clock."""

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of it."""
        if self.timer is None:
            yield
        else:
            with self.timer.time(name):
                yield


class Table(BatchedDataDict[Any]):
    """All that is known of N rows; see `Conversations.table`."""

    def mark_stale(self, current_version: int, max_staleness: int) -> Tensor:
        """See `versions.mark_stale`."""
        return mark_stale(self, current_version, max_staleness)

    def replaced(
        self, rows: Tensor, others: Table, pads: Mapping[str, int | float]
    ) -> Table:
        """Return a table with M other rows in the place of `rows` [M]."""
        for name in (self.keys() | others.keys()) - (self.keys() & others.keys()):
            # A reward's name that only one of the two has come to know.
            for table in (self, others):
                table.setdefault(name, torch.full((table.size,), torch.nan))
        order = torch.arange(self.size)
        order[rows] = self.size + torch.arange(others.size)
        return Table(Table.from_batches([self, others], pads).select_indices(order))
