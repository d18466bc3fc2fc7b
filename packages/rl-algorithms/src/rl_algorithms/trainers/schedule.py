"""Schedules of validation and early stopping: pure functions of state and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_distributed.errors import ConfigError

if TYPE_CHECKING:
    from rl_algorithms.trainers.run.state import TrainerState
    from rl_algorithms.trainers.settings.config import TrainerConfig
    from rl_distributed.checkpoint import CheckpointingConfig

__all__ = [
    "EarlyStop",
    "Patience",
    "RunPlan",
    "ValidationSchedule",
    "check_accuracy",
    "check_held_out",
    "check_measured",
    "count_steps",
    "unranked_warning",
]


@dataclass(frozen=True)
class ValidationSchedule:
    """The steps after which a validation runs."""

    period: int = 0
    """Number of steps between validations; 0 for no periodic validation."""
    start_at: int = -1
    """First step for a periodic validation; -1 for no such limit."""
    at_start: bool = False
    """Whether to validate before the first step."""
    at_end: bool = False
    """Whether to validate after the last step."""

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether to validate after `step` steps.

        Args:
            step: Number of completed steps.
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
        """Whether any validation can take place."""
        return self.period > 0 or self.at_start or self.at_end


def check_measured(
    metric: str | None, schedule: ValidationSchedule, *, has_data: bool
) -> None:
    """Check that validations measure a metric that is to end the run.

    Args:
        metric: Metric that is to end the run; None for none.
        schedule: Validations of the run.
        has_data: Whether there are held-out data.

    Raises:
        ConfigError: Nothing would ever measure the metric.
    """
    if metric is not None and not (has_data and schedule.ever):
        raise ConfigError(
            f"{metric} is to end the run, and no validation would measure it: give "
            "held-out data (data.validation, or val_dataset) and a val_period, or "
            "leave early_stop and stop_at_validation_metric out"
        )


def check_held_out(schedule: ValidationSchedule, *, has_data: bool) -> None:
    """Check that a validation at the start or end has data.

    Raises:
        ConfigError: It has none.
    """
    asked = [n for n in ("at_start", "at_end") if getattr(schedule, n)]
    if asked and not has_data:
        raise ConfigError(
            f"val_{' and val_'.join(asked)} asks for a validation, and there are no "
            "held-out data: give them (data.validation, data.split_validation_size, or "
            "val_dataset), or leave it out (false)"
        )


def check_accuracy(metrics: Iterable[str | None], threshold: float | None) -> None:
    """Check that nothing needs an accuracy that a reward function cannot provide.

    Args:
        metrics: Metrics that rank checkpoints or end the run; None is ignored.
        threshold: `accuracy_threshold` of the run.

    Raises:
        ConfigError: A metric needs an accuracy, and there is no threshold.
    """
    if threshold is not None:
        return
    for name in metrics:
        kind, _, rest = (name or "").partition(":")
        *_, own, last = ("", *rest.split("/"))
        if kind == "val" and last == "accuracy" and own != "env":
            raise ConfigError(
                f"{name} ranks checkpoints or ends the run, and a reward function does "
                "not say which answers are right: name val:reward, or set "
                "accuracy_threshold to the reward from which on an answer is right"
            )


def unranked_warning(
    ranking: CheckpointingConfig,
    schedule: ValidationSchedule,
    total_steps: int,
    *,
    has_data: bool,
) -> str | None:
    """Return a warning about checkpoints that no validation will rank, or None.

    Args:
        ranking: Schedule and ranking of checkpoints.
        schedule: Validations of the run.
        total_steps: Step at which the run ends.
        has_data: Whether there are held-out data.
    """
    name, period = ranking.metric_name, ranking.save_period
    if not ranking.enabled or name is None or not name.startswith("val:"):
        return None
    if not (has_data and schedule.ever):
        return (
            f"checkpointing.metric_name={name} ranks nothing, because no validation "
            "measures it: the newest checkpoint counts as the best; give held-out data "
            "and a val_period, or leave metric_name out"
        )
    # The last step is saved even if it is no multiple of the period.
    saved = sorted({*range(period, total_steps + 1, period), total_steps})
    missed = [s for s in saved if not schedule.due(s, last=s == total_steps)]
    if not missed:
        return None
    shown = ", ".join(map(str, missed[:3])) + (", ..." if len(missed) > 3 else "")
    remedies = []
    if missed != [total_steps]:
        whole = f" ({schedule.period})" if schedule.period else ""
        remedies.append(f"make save_period a multiple of val_period{whole}")
    if total_steps in missed:
        remedies.append("set val_at_end for the last one")
    return (
        f"checkpointing.save_period={period} does not fit the validations: "
        f"{len(missed)} of {len(saved)} checkpoints (steps {shown}) will have no "
        f"{name} and rank last; {', and '.join(remedies)}"
    )


@dataclass(frozen=True)
class EarlyStop:
    """Ends a run when a metric of the validation reaches its goal."""

    metric: str | None = None
    """Name such as `val:accuracy`; None for no early stop."""
    threshold: float = math.inf
    """Value that ends the run."""
    higher_is_better: bool = True
    """Whether the metric must rise to the threshold or fall to it."""

    def reason(self, metrics: Mapping[str, float]) -> str | None:
        """Return why to stop, or None to continue.

        Raises:
            ConfigError: The validation has no such metric.
        """
        if self.metric is None:
            return None
        value = _value_of("stop_at_validation_metric", self.metric, metrics)
        if self._falls_short(value):
            return None
        return f"{self.metric} reached {value:.4g} {self._goal}"

    def shortfall(self, metrics: Mapping[str, float]) -> str:
        """Return how a run that ended otherwise missed its goal, or ""."""
        value = metrics.get(self.metric or "")
        if value is None or not self._falls_short(value):
            return ""
        return f"the goal was missed: {self.metric} is {value:.4g}, not {self._goal}"

    def _falls_short(self, value: float) -> bool:
        if self.higher_is_better:
            # `not >=` and not `<`, so that NaN falls short as well.
            return not value >= self.threshold
        return not value <= self.threshold

    @property
    def _goal(self) -> str:
        return f"{'>=' if self.higher_is_better else '<='} {self.threshold:g}"


@dataclass(frozen=True)
class Patience:
    """Ends a run when a metric of the validation has not improved for a while."""

    metric: str | None = None
    """Name such as `val:accuracy`."""
    patience: int = 0
    """Number of validations without a new best value that end the run; 0 for never."""
    min_delta: float = 0.0
    """Minimum improvement over the best value that counts."""
    higher_is_better: bool = True
    """Whether higher values are better."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Patience:
        """Read the section `early_stop`, with the ranking of checkpoints as default.

        Raises:
            ConfigError: No section names a metric.
        """
        settings, ranking = config.early_stop, config.checkpointing
        if settings is None:
            return cls()
        metric = settings.metric or ranking.metric_name
        if metric is None:
            raise ConfigError(
                "early_stop needs the name of a metric of the validation, such as "
                "val:accuracy: set early_stop.metric or checkpointing.metric_name"
            )
        if settings.goal is not None:
            higher = settings.goal == "max"
        elif metric == ranking.metric_name:
            higher = ranking.higher_is_better
        else:
            higher = "loss" not in metric
        return cls(metric, settings.patience, settings.min_delta, higher)

    def observe(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        """Update the best value with the metrics of a validation.

        Raises:
            ConfigError: The validation has no such metric.
        """
        if self.metric is None:
            return
        value = _value_of("early_stop.metric", self.metric, metrics)
        # NaN is neither more nor less than any number: as the best value it would make
        # all later ones no improvement.
        best = state.best_value
        if best is None or math.isnan(best):
            is_better = not math.isnan(value)
        else:
            gain = value - best
            is_better = (gain if self.higher_is_better else -gain) > self.min_delta
        if is_better:
            state.best_value, state.validations_since_best = value, 0
        else:
            state.validations_since_best += 1

    def reason(self, state: TrainerState) -> str | None:
        """Return why to stop, or None to continue."""
        since = state.validations_since_best
        if not self.patience or since < self.patience:
            return None
        best = state.best_value
        if best is None:
            return f"{self.metric} was not a number in {since} validations"
        return f"{self.metric} has not improved on {best:.4g} in {since} validations"


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run by its configuration, checked as a whole."""

    validations: ValidationSchedule
    """Validations of the run."""
    patience: Patience
    """Patience with validations that do not improve."""
    total_steps: int
    """Number of steps of the run."""
    warning: str | None = None
    """Warning to log, or None."""


def _value_of(key: str, metric: str, metrics: Mapping[str, float]) -> float:
    if metric not in metrics:
        known = ", ".join(sorted(n for n in metrics if n.startswith("val:")))
        raise ConfigError(
            f"{key}: the validation has no {metric!r}; it has {known or 'no metrics'}"
        )
    return metrics[metric]


def count_steps(
    steps_per_epoch: int | None, max_num_epochs: int | None, max_num_steps: int | None
) -> int:
    """Return the number of steps of a run.

    Args:
        steps_per_epoch: Number of steps per epoch; None for a stream of unknown length,
            which may end earlier.
        max_num_epochs: Maximum number of passes over the data; None for no limit.
        max_num_steps: Maximum number of steps; None for no limit.

    Raises:
        ConfigError: Neither limit is set, or only epochs of unknown length are.
    """
    if steps_per_epoch is None and max_num_steps is None:
        raise ConfigError(
            "max_num_steps is null and the training data are a stream of unknown "
            "length: set max_num_steps"
        )
    limits = []
    if max_num_epochs is not None and steps_per_epoch is not None:
        limits.append(max_num_epochs * steps_per_epoch)
    if max_num_steps is not None:
        limits.append(max_num_steps)
    if not limits:
        raise ConfigError(
            "max_num_steps and max_num_epochs are both null: the run would never end; "
            "set one of them"
        )
    return min(limits)
