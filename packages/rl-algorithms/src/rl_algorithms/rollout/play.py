"""`Play`: the arguments of a rollout."""

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
    """Arguments of a rollout, shared by all of its attempts."""

    seed: int
    step: int
    first_prompt_index: int
    greedy: bool
    sampling: SamplingParams | None
    timer: Timer | None
    begin_s: float = field(default_factory=time.monotonic)
    """Start of the rollout on the monotonic clock."""

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the rollout."""
        if self.timer is None:
            yield
        else:
            with self.timer.time(name):
                yield
