"""When a run validates, saves and stops: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rl_distributed.errors import ConfigError

__all__ = ["EarlyStop", "ValidationSchedule", "count_steps"]


@dataclass(frozen=True)
class ValidationSchedule:
    """Steps after which a validation runs."""

    period: int = 0
    """Every so many steps; 0 turns periodic validation off."""
    start_at: int = -1
    """No periodic validation before this step; -1 has no such limit."""
    at_start: bool = False
    """Also before the first step."""
    at_end: bool = False
    """Also after the last step."""

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether to validate after `step` steps.

        Args:
            step: Steps done; 0 before the first.
            last: Whether no further step follows.
        """
        if step == 0 and not last:
            return self.at_start
        if last and self.at_end:
            return True
        return bool(
            self.period > 0
            and step > 0
            and step >= self.start_at
            and step % self.period == 0
        )

    @property
    def ever(self) -> bool:
        """Whether any validation can happen."""
        return self.period > 0 or self.at_start or self.at_end


@dataclass(frozen=True)
class EarlyStop:
    """Ends a run when a metric of the validation reaches its goal."""

    metric: str | None = None
    """Name such as `val:accuracy`; None never stops early."""
    threshold: float = math.inf
    """The goal."""
    higher_is_better: bool = True
    """Whether the metric must rise to the goal or fall to it."""

    def reason(self, metrics: Mapping[str, float]) -> str | None:
        """Return why to stop, or None to go on.

        Raises:
            ConfigError: The validation has no such metric.
        """
        if self.metric is None:
            return None
        if self.metric not in metrics:
            known = ", ".join(sorted(n for n in metrics if n.startswith("val:")))
            raise ConfigError(
                f"stop_at_validation_metric: the validation has no {self.metric!r}; "
                f"it has {known or 'no metrics'}"
            )
        value = metrics[self.metric]
        if self.higher_is_better:
            reached, sign = value >= self.threshold, ">="
        else:
            reached, sign = value <= self.threshold, "<="
        if not reached:
            return None
        return f"{self.metric} reached {value:.4g} {sign} {self.threshold:g}"


def count_steps(
    steps_per_epoch: int, max_num_epochs: int | None, max_num_steps: int | None
) -> int:
    """Return at which step a run ends.

    Raises:
        ConfigError: Neither limit is set.
    """
    limits = []
    if max_num_epochs is not None:
        limits.append(max_num_epochs * steps_per_epoch)
    if max_num_steps is not None:
        limits.append(max_num_steps)
    if not limits:
        raise ConfigError(
            "max_num_steps and max_num_epochs are both null: the run would never end; "
            "set one of them"
        )
    return min(limits)
