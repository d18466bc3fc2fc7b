"""Runs below a folder and how they stand, without loading anything heavy.

Of a long metrics file only validations and the last lines are read: enough for the best
value and the newest step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.figures import Figures, format_measure
from rl_algorithms.trainers.run.history import History, metric_name
from rl_cli.report.run_reader import read_json, stage_folders
from rl_distributed.runs.ending import RunState, read_ending, run_state

__all__ = ["RunSummary", "find_runs", "summarize_run"]

_MOST_DEPTH = 4
_WHOLE_BYTES = 1 << 21
"""Metrics files up to this size are read as a whole."""
_TAIL_BYTES = 1 << 17


@dataclass(frozen=True)
class RunSummary:
    """A run in one line."""

    folder: str
    """The folder, below the one that was searched."""
    name: str
    """Name of the recipe, the algorithm or the trainer."""
    state: RunState
    """How it stands."""
    stage: str | None
    """The stage that began last; None where the run has no stages."""
    steps: int
    """Steps of all stages that have begun."""
    measure: str | None
    """What tells most about the last stage, such as `val:accuracy`."""
    best: float | None
    """The best value of the measure."""
    best_step: int | None
    """Step of the last stage with the best value."""
    started: str | None
    """When the run began, in UTC, as ISO 8601."""
    age_s: float | None
    """Seconds since then."""
    reason: str | None
    """Why it failed or was interrupted, where the run could say so."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @property
    def shown_best(self) -> str:
        """The best value for people; "" where nothing was measured."""
        if self.measure is None:
            return ""
        return f"{self.measure} {format_measure(self.measure, self.best)}"

    @property
    def shown_age(self) -> str:
        """The age for people: `40 s`, `5 min`, `3 h`, `12 d`; "" if it is unknown."""
        if self.age_s is None:
            return ""
        for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
            if self.age_s >= 2 * size:
                return f"{self.age_s / size:.0f} {unit}"
        return f"{self.age_s:.0f} s"


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, or that folder itself, by name.

    What lies inside of a run (its stages, its checkpoints) is not searched, and neither
    are hidden folders; runs may lie at most four levels below.
    """
    yield from _runs(root, _MOST_DEPTH)


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
        return
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # somebody else's, or removed since
        return
    for entry in entries:
        if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _runs(Path(entry.path), depth - 1)


def summarize_run(folder: Path, root: Path, now: datetime | None = None) -> RunSummary:
    """Return a run in one line.

    Args:
        folder: The folder of the run; whatever is missing or torn is left out.
        root: The folder that was searched.
        now: The time that ages are reckoned from; default: now.
    """
    record = read_json(folder / "run.json")
    state = run_state(folder)
    ending = read_ending(folder)
    stages = stage_folders(folder, record)
    histories = [_history(path / "metrics.jsonl") for path in stages.values()]
    figures = Figures.of(histories[-1] if histories else History())
    started = record.get("started")
    has_stages = (folder / "stages").is_dir()
    return RunSummary(
        folder=str(folder.relative_to(root)) if folder != root else folder.name,
        name=str(record.get("name", "")),
        state=state,
        stage=list(stages)[-1] if has_stages and stages else None,
        steps=sum(int(found[-1]["step"]) for found in histories if found),
        measure=figures.measure,
        best=figures.best,
        best_step=figures.best_step,
        started=started if isinstance(started, str) else None,
        age_s=_age_s(started, now or datetime.now(UTC)),
        reason=ending.reason if ending and state == ending.state else None,
    )


def _age_s(started: Any, now: datetime) -> float | None:
    try:
        return max((now - datetime.fromisoformat(started)).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


def _history(path: Path) -> History:
    history = History()
    for record in _records(path):
        step, metrics = record.get("step"), record.get("metrics")
        if isinstance(step, int) and isinstance(metrics, Mapping):
            named = {n: v for k, v in metrics.items() if (n := metric_name(k))}
            history.add(step, {n: v for n, v in named.items() if _is_number(v)})
    return history


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; of a long one validations and the last lines."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            place = 0
            for line in file:
                place += len(line)
                is_near_end = size <= _WHOLE_BYTES or place > size - _TAIL_BYTES
                if not is_near_end and b'"val:' not in line:
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record
    except OSError:
        return
