"""A run in a few figures: its main measure at the start, at best and at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rl_algorithms.trainers.run.history import History

__all__ = ["Figures", "format_measure", "measure_of"]

_MEASURES = (
    "val:accuracy",
    "val:reward",
    "val:val_loss",
    "val:loss",
    "train:reward",
    "train:loss",
)
"""Most telling first: held-out data before training data. Runs with a reward function
have no accuracy, and runs that imitate have no rewards."""


def measure_of(names: Iterable[str]) -> str | None:
    """Return the most telling measure among names such as `val:reward`, or None."""
    present = set(names)
    return next((name for name in _MEASURES if name in present), None)


def format_measure(measure: str, value: float | None) -> str:
    """Return a value of a measure in readable form, or "" for None."""
    if value is None:
        return ""
    return f"{value:.1%}" if measure.endswith("accuracy") else f"{value:.4g}"


@dataclass(frozen=True)
class Figures:
    """Development of one measure in a run; all fields are None if there is none."""

    measure: str | None = None
    """Name of the measure, such as `val:accuracy`."""
    start: float | None = None
    """First value."""
    start_step: int | None = None
    """Step of the first value; 0 for before training."""
    best: float | None = None
    """Best value: the lowest of a loss, the highest of anything else."""
    best_step: int | None = None
    """Step of the best value."""
    end: float | None = None
    """Last value."""
    nothing_learnt: str | None = None
    """A sentence for the user, if the measure never improved on its start."""

    @classmethod
    def of(cls, history: History) -> Self:
        """Return the figures of a history."""
        measure = measure_of(history.names)
        if measure is None:
            return cls()
        steps, values = history.column(measure)
        sign = -1.0 if measure.endswith("loss") else 1.0
        # NaN is neither more nor less than any number: as the first value it would win.
        known = [i for i, value in enumerate(values) if not math.isnan(value)]
        # Of equal values max takes the first, the earliest step.
        best = max(known or range(len(values)), key=lambda i: sign * values[i])
        return cls(
            measure=measure,
            start=values[0],
            start_step=steps[0],
            best=values[best],
            best_step=steps[best],
            end=values[-1],
            nothing_learnt=_nothing_learnt(measure, sign, values),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def _nothing_learnt(measure: str, sign: float, values: Sequence[float]) -> str | None:
    """Return a sentence if nothing was learned, otherwise None."""
    # NaN says nothing, as a validation of which no answer was scored.
    values = [value for value in values if not math.isnan(value)]
    if len(values) < 2:
        return None
    if measure.startswith("val:"):
        before, after = values[0], max(values[1:], key=lambda value: sign * value)
        when = "at the start", "at best afterwards"
    else:
        # Each step has other data, so single steps are too noisy: compare halves.
        half = len(values) // 2
        before, after = _mean(values[:half]), _mean(values[half:])
        when = "in the first half of the steps", "in the second"
    # `not <=`, so that the mean of opposite infinities is no lack of progress.
    if not sign * after <= sign * before:
        return None
    shown = format_measure(measure, before), format_measure(measure, after)
    return (
        f"Nothing was learnt: {measure} is {shown[0]} {when[0]} and {shown[1]} "
        f"{when[1]}."
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
