"""`SecondCheckWatch`: warns if a second check rejects too many good answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from rl_envs.outcomes import second_check_of

__all__ = ["SecondCheckWatch"]

_NUM_STEPS = 10
# Of fewer answers, one or two would decide.
_LEAST_CHECKED = 20


class SecondCheckWatch:
    """Watches the verdicts of second checks, and warns at most once.

    Args:
        max_rejected_rate: Share of the answers checked in the newest steps that may be
            rejected.
    """

    def __init__(self, max_rejected_rate: float) -> None:
        self._limit = max_rejected_rate
        self._steps: deque[tuple[int, int]] = deque(maxlen=_NUM_STEPS)
        self._now = (0, 0)
        self._has_spoken = False

    def note(self, metadata: Iterable[Any]) -> None:
        """Add the answers of a step, or of a part of it.

        Args:
            metadata: The metadata that the environment returned for each row.
        """
        checked = [v for v in map(second_check_of, metadata) if v is not None]
        rejected, size = self._now
        self._now = (rejected + checked.count(False), size + len(checked))

    def end_step(self) -> str | None:
        """End a step; return a warning or None."""
        self._steps.append(self._now)
        self._now = (0, 0)
        rejected = sum(step[0] for step in self._steps)
        size = sum(step[1] for step in self._steps)
        if self._has_spoken or size < _LEAST_CHECKED or rejected <= self._limit * size:
            return None
        self._has_spoken = True
        return (
            f"the reward may be hacked: the second check rejected {rejected} of {size} "
            f"high-scoring answers of the last {len(self._steps)} steps, more than "
            f"rollout.max_rejected_rate={self._limit:g} allows; read the rejected "
            "answers in `rl report`, and have the reward check what they evade"
        )
