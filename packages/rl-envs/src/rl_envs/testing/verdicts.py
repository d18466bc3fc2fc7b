"""Which responses have earned the full reward, and which should have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_envs.testing.findings import Examination, Finding
from rl_envs.testing.responses import Trial

__all__ = ["Excuse", "Verdicts", "failed"]

Excuse = Callable[[Mapping[str, Any], str], bool]
"""Function of a row and a response: whether the response is right, too."""

_WRONG = {
    "empty": "empty responses earn less",
    "garbage": "garbage earns less",
    "prompt": "the copied prompt earns less",
}
_GOLD = "gold answers earn the full reward"
_CHANGE = "one changed character earns less"


def failed(check: str, reason: str, trial: Trial) -> Finding:
    """Return a failure at a trial."""
    return Finding(check, "fail", reason, trial.row, trial.response)


@dataclass(frozen=True)
class Verdicts:
    """Rewards of right and wrong responses."""

    rows: Sequence[Mapping[str, Any]]
    trials: Sequence[Trial]
    rewards: npt.NDArray[np.float64]
    """[T] of each trial; NaN: not scored."""
    ends: npt.NDArray[np.bool_]
    """[T] whether its conversation has ended."""
    config: Examination
    excuse: Excuse | None

    def findings(self) -> list[Finding]:
        """Return a finding for each kind of response."""
        wrong = [self._wrong(kind, name) for kind, name in _WRONG.items()]
        return [self._gold(), *wrong, self._changes()]

    def _of_kind(self, kind: str) -> list[int]:
        return [index for index, t in enumerate(self.trials) if t.kind == kind]

    def _gold(self) -> Finding:
        indices = self._of_kind("gold")
        if not indices:
            wanted = self.config.gold_column or "answer or ground_truth"
            return Finding(_GOLD, "skip", f"no row has a text in the column {wanted}")
        if not self.ends[indices].any():
            return Finding(_GOLD, "skip", "conversations continue after a gold answer")
        full = self.rewards[indices] >= self.config.full_reward
        if self.config.allow_unscored:
            full |= np.isnan(self.rewards[indices])
        if full.all():
            return Finding(_GOLD, "pass", f"{len(indices)} rows")
        worst = indices[int(np.argmin(full))]
        reason = (
            f"{int((~full).sum())} of {len(indices)} earn less than "
            f"{self.config.full_reward:g}: got {self.rewards[worst]:g}"
        )
        return failed(_GOLD, reason, self.trials[worst])

    def _wrong(self, kind: str, name: str) -> Finding:
        indices = self._of_kind(kind)
        accepted = self._accepted(indices)
        if not accepted:
            return Finding(name, "pass", f"{len(indices)} rows")
        reason = f"{len(accepted)} of {len(indices)} earn the full reward"
        return failed(name, reason, self.trials[accepted[0]])

    def _changes(self) -> Finding:
        indices = self._of_kind("change")
        if not indices:
            return Finding(_CHANGE, "skip", "no row has a gold answer")
        accepted = self._accepted(indices)
        limit = self.config.max_accepted_changes
        reason = f"{len(accepted)} of {len(indices)} earn the full reward"
        if len(accepted) <= limit * len(indices):
            return Finding(_CHANGE, "pass", reason)
        reason += f", more than {limit:.0%}"
        return failed(_CHANGE, reason, self.trials[accepted[0]])

    def _accepted(self, indices: Sequence[int]) -> list[int]:
        """Return the wrong responses with full reward that are not excused."""
        full = [i for i in indices if self.rewards[i] >= self.config.full_reward]
        excuse = self.excuse
        if excuse is None:
            return full
        named = [(i, self.trials[i]) for i in full]
        return [i for i, t in named if not excuse(self.rows[t.row], t.response)]
