"""`RewardWatch`: detects rewards without any learning signal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["RewardWatch"]

_NUM_STEPS = 5
_REMEDY = (
    "look at answers and their rewards: the reward function may miss what it looks for "
    "(check the format that it expects and max_new_tokens), or the tasks are all too "
    "hard or too easy for the model (give partial credit, take other tasks, or train "
    "on demonstrations first)"
)


@dataclass
class _Step:
    """The rewards of one step."""

    num_answers: int = 0
    num_groups: int = 0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest value of each reward, by name."""
    varies_in_group: bool = False


class RewardWatch:
    """Watches the rewards of a run, and warns at most once.

    Args:
        compares_groups: Whether answers are only compared within their group.
    """

    def __init__(self, *, compares_groups: bool = False) -> None:
        self._compares_groups = compares_groups
        self._steps: deque[_Step] = deque(maxlen=_NUM_STEPS)
        self._now = _Step()
        self._has_spoken = False

    def note(self, rows: Mapping[str, Any]) -> None:
        """Add the answers of a step, or of a part of it.

        Args:
            rows: Columns of `RolloutResult.rows`.
        """
        counted = rows["sample_mask"] != 0
        if self._has_spoken or not bool(counted.any()):
            return
        now, groups = self._now, rows["group_index"][counted]
        now.num_answers += int(counted.sum())
        now.num_groups += len(groups.unique())
        # Parts instead of their sum: algorithms such as GDPO learn from each of them.
        names = [name for name in rows if name.startswith("reward/")] or ["rewards"]
        for name in names:
            rewards = rows[name][counted].double()
            scored = ~rewards.isnan()
            if not bool(scored.any()):
                continue
            rewards = rewards[scored]
            found = (float(rewards.min()), float(rewards.max()))
            now.ranges[name] = _joined(now.ranges.get(name, found), found)
            now.varies_in_group |= _varies(rewards, groups[scored])

    def end_step(self) -> str | None:
        """End a step; return a warning or None."""
        now, self._now = self._now, _Step()
        self._steps.append(now)
        full = len(self._steps) == _NUM_STEPS
        # A step without answers says nothing about the rewards.
        if self._has_spoken or not full or not all(s.num_answers for s in self._steps):
            return None
        num_answers = sum(step.num_answers for step in self._steps)
        ranges = _ranges(self._steps)
        found = None
        if ranges and all(low == high for low, high in ranges.values()):
            value = f" ({ranges['rewards'][0]:g})" if "rewards" in ranges else ""
            found = f"all {num_answers} answers of the last {_NUM_STEPS} steps got the "
            found += f"same reward{value}"
        elif self._compares_groups and not any(s.varies_in_group for s in self._steps):
            num_groups = sum(step.num_groups for step in self._steps)
            found = f"in each of the {num_groups} groups of the last {_NUM_STEPS} steps"
            found += " all answers got the same reward"
        if found is None:
            return None
        self._has_spoken = True
        return f"nothing to learn from: {found}; {_REMEDY}"


def _ranges(steps: Iterable[_Step]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for step in steps:
        for name, own in step.ranges.items():
            found[name] = _joined(found.get(name, own), own)
    return found


def _joined(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])


def _varies(rewards: Tensor, groups: Tensor) -> bool:
    """Return whether two answers of one group have different rewards."""
    kinds: Tensor = torch.unique(groups)
    # Group indices may be sparse, and scatter needs them to be 0 to G - 1.
    numbers = torch.searchsorted(kinds, groups)
    num_groups = int(numbers.max()) + 1
    low = torch.full((num_groups,), torch.inf, dtype=rewards.dtype)
    high = torch.full((num_groups,), -torch.inf, dtype=rewards.dtype)
    low.scatter_reduce_(0, numbers, rewards, "amin")
    high.scatter_reduce_(0, numbers, rewards, "amax")
    return bool((low != high).any())
