"""What a comparison of two runs finds, part by part."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_cli.report.run_reader import ReadStage

__all__ = ["PARTS", "Difference", "Part", "Rules", "StagePair"]

StagePair = tuple[ReadStage, ReadStage]
"""The same stage of both runs."""

PARTS = (
    "configuration",
    "environment",
    "data",
    "events",
    "answers",
    "rows",
    "metrics",
    "checkpoints",
    "length",
)
"""Parts of a run, in the order in which a step produces them: a difference in the
answers precedes one in the training rows and the metrics of the same step."""


@dataclass(frozen=True)
class Rules:
    """What counts as a difference."""

    tolerance: float = 0.0
    """Largest difference of two numbers that counts as none, relative to the larger of
    them; absolute if both are below 1."""
    ignored: tuple[str, ...] = ()
    """Patterns of keys and metrics to leave out; a section stands for its keys."""

    def ignores(self, key: str) -> bool:
        """Return whether a key or metric is left out."""
        return any(
            fnmatch.fnmatchcase(key, pattern) or key.startswith(f"{pattern}.")
            for pattern in self.ignored
        )

    def same(self, first: Any, second: Any) -> bool:
        """Return whether two JSON values are the same, numbers within the tolerance."""
        # Types as well: `True == 1` in Python, but not in JSON.
        if not (_is_number(first) and _is_number(second)):
            return bool(type(first) is type(second) and first == second)
        # Two runs that diverged alike are the same, though NaN differs from itself.
        if first == second or (math.isnan(first) and math.isnan(second)):
            return True
        # Not below 1: losses and advantages near 0 would differ by any rounding.
        scale = max(1.0, abs(first), abs(second))
        return bool(
            math.isfinite(scale) and abs(first - second) <= self.tolerance * scale
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Difference:
    """One thing in which the runs differ."""

    what: str
    """The key, metric, token, event or tensor."""
    first: Any
    """Value in the first run; None: it has none."""
    second: Any
    step: int | None = None
    """Step of the stage; None: before the first step."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further facts by name, such as the seed and the weight versions of an answer."""


@dataclass(frozen=True)
class Part:
    """The comparison of one part of two runs."""

    name: str
    """One of `PARTS`."""
    stage: str | None = None
    """Name of the stage; None: of the whole run."""
    compared: str = ""
    """Amount that both runs have, in words."""
    differences: tuple[Difference, ...] = ()
    """The first differences; at most one step of metrics or checkpoints."""
    num_different: int = 0
    """Number of things that differ, also beyond the first step."""
    reason: str | None = None
    """Why nothing was compared; None: something was."""
    left_out: tuple[str, ...] = ()
    """What was left out on purpose, such as measurements of time."""

    @property
    def verdict(self) -> str:
        """`different`, `same` or `not compared`."""
        if self.differences:
            return "different"
        return "same" if self.reason is None else "not compared"

    def to_dict(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return {**asdict(self), "verdict": self.verdict}
