"""`StalenessRule`: how long a group can wait, and how many can wait at a time.

A group whose oldest token was sampled with version v can be used by the steps up to
v + max_staleness. No sampled group is wasted as long as full steps, one after another,
can train on all of them in time: sorted by their last possible step, the i-th group
(from 0) fits if that step is at least the next step plus i // num_prompts_per_step. A
prompt is admitted, and a step begins, only if that still holds afterwards. The run
therefore waits for a slow group and never has to throw it away. Only a run that was
resumed with a lower limit or fewer prompts per step drops groups, in `drops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["StalenessRule"]


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """Decides which groups are too old, or would become so."""

    max_staleness: int
    num_prompts_per_step: int
    max_num_steps: int | None = None
    """Steps of the run, so that no group is sampled that would be left over."""

    def last_step(self, oldest_version: int) -> int:
        """Return the last step that may train on tokens of this version."""
        return oldest_version + self.max_staleness

    def is_too_old(self, oldest_version: int, step: int) -> bool:
        """Return whether a step must not train on tokens of this version."""
        return step > self.last_step(oldest_version)

    def fits(
        self, oldest_versions: Iterable[int] | Mapping[int, int], next_step: int
    ) -> bool:
        """Return whether all groups can be trained on before they are too old.

        Args:
            oldest_versions: Version of the oldest token of each waiting group, or the
                number of groups by version.
            next_step: The step that can take the first of them.
        """
        # Unary plus drops versions without groups.
        counts, num_served = +Counter(oldest_versions), 0
        # Sorted by version, so by last possible step: serving the most urgent first is
        # optimal, so if this order fails, every order does.
        for version in sorted(counts):
            num_served += counts[version]
            # The last group of a version waits longest.
            step = next_step + (num_served - 1) // self.num_prompts_per_step
            if self.is_too_old(version, step):
                return False
        return True

    def has_steps_for(self, num_groups: int, next_step: int) -> bool:
        """Return whether the run has steps left that can take these groups."""
        if self.max_num_steps is None:
            return True
        return (
            num_groups <= (self.max_num_steps - next_step) * self.num_prompts_per_step
        )
