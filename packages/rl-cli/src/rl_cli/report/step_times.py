"""Time of the steps by phase."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rl_cli.report.metric_table import MetricTable

__all__ = ["PhaseTimes", "phase_times"]

_TIMING = "timing:"
_TOTAL = "total_step_time"
# Between the steps, so not included in `total_step_time`.
_BETWEEN = ("validation", "checkpointing")
_OTHER = "other"
_MOST_BUCKETS = 240


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds by phase, with consecutive steps merged if there are many."""

    steps: list[int]
    """Last step of each bucket."""
    phases: dict[str, list[float]]
    """Mean seconds per step in each bucket, by phase: disjoint parts that add up to the
    total; `other` is the unmeasured rest."""
    totals: dict[str, float]
    """Total seconds of the stage, by phase."""
    parts: dict[str, float]
    """Total seconds of the stage, by part of a phase (`generation/sampling`)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON values."""
        return asdict(self)


def phase_times(table: MetricTable) -> PhaseTimes | None:
    """Return the times of a stage by phase; None: they were not measured."""
    columns = {
        # As dicts, in which each step is looked up several times below.
        name.removeprefix(_TIMING): dict(column.items())
        for name, column in table.columns.items()
        if name.startswith(_TIMING)
    }
    whole = columns.pop(_TOTAL, None)
    if not whole:
        return None
    # Parts are named PHASE/PART; some phases have only parts.
    parts = {name: column for name, column in columns.items() if "/" in name}
    phases = {name: column for name, column in columns.items() if "/" not in name}
    for name, column in parts.items():
        phase, _, part = name.partition("/")
        if phase not in columns and part == "total":
            phases[phase] = column
    inside = [column for name, column in phases.items() if name not in _BETWEEN]
    phases[_OTHER] = {
        # Parts and whole are measured apart, so the rest may come out slightly
        # negative.
        step: max(seconds - math.fsum(c.get(step, 0.0) for c in inside), 0.0)
        for step, seconds in whole.items()
    }
    steps = sorted({*whole, *(s for name in _BETWEEN for s in phases.get(name, {}))})
    size = math.ceil(len(steps) / _MOST_BUCKETS)
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    shown = {
        name: [
            math.fsum(column.get(s, 0.0) for s in bucket) / len(bucket)
            for bucket in buckets
        ]
        for name, column in phases.items()
    }
    totals = {name: math.fsum(column.values()) for name, column in phases.items()}
    order = sorted(totals, key=lambda name: (name == _OTHER, -totals[name]))
    return PhaseTimes(
        steps=[bucket[-1] for bucket in buckets],
        phases={name: shown[name] for name in order},
        totals={name: totals[name] for name in order},
        parts={
            name: math.fsum(column.values())
            for name, column in parts.items()
            # That of the phase itself, which has a row of its own.
            if not name.endswith("/total")
        },
    )
