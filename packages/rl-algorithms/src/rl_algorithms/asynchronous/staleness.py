"""`StalenessRule`: how long a group can wait, and how many can wait at a time.

A group whose oldest token was sampled with weights v can be trained on by the steps up
to v + max_staleness. Groups are too old for nothing as long as those that are sampled
can all be trained on in time, a full step after the other: sorted by their last step,
the i-th (from 0) has a place if its last step is at least the next step plus
i // num_prompts_per_step. A prompt is admitted, and a step begins, only where that
holds afterwards. So a slow group is waited for and not thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["StalenessRule"]


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """What is too old, and what would become so."""

    max_staleness: int
    num_prompts_per_step: int
    max_num_steps: int | None = None
    """Steps of the run: what would be left over at its end is not sampled."""

    def last_step(self, oldest_version: int) -> int:
        """Return the last step that may train on tokens of this version."""
        return oldest_version + self.max_staleness

    def is_too_old(self, oldest_version: int, step: int) -> bool:
        """Return whether a step may no longer train on tokens of this version."""
        return step > self.last_step(oldest_version)

    def fits(self, oldest_versions: Iterable[int], next_step: int) -> bool:
        """Return whether groups can all be trained on before they are too old.

        Args:
            oldest_versions: One for each group that waits.
            next_step: The step that can take the first of them.
        """
        per_step = self.num_prompts_per_step
        return not any(
            self.is_too_old(version, next_step + place // per_step)
            for place, version in enumerate(sorted(oldest_versions))
        )

    def has_steps_for(self, num_groups: int, next_step: int) -> bool:
        """Return whether the run has steps left that can take these groups."""
        if self.max_num_steps is None:
            return True
        return (
            num_groups <= (self.max_num_steps - next_step) * self.num_prompts_per_step
        )
