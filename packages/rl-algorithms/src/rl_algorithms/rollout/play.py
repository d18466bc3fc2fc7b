"""`Play`: how a rollout is played."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_models.types import SamplingParams

if TYPE_CHECKING:
    from rl_distributed.timing.timer import Timer

__all__ = ["Play"]


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
