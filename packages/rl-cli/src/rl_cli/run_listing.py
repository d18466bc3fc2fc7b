"""Runs below a folder and their state, found without heavy imports.

Only validations and the last lines of long metrics files are parsed, which is enough
for the best value and the newest step.
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
from rl_cli.report.run_reader import end_reason, read_json, stage_folders
from rl_cli.run_folder import RESTARTS
from rl_distributed.runs.ending import RunState, run_state

__all__ = ["RunSummary", "find_runs", "summarize_run"]

_MOST_DEPTH = 4
_WHOLE_BYTES = 1 << 21
"""Size up to which metrics files are parsed completely."""
_TAIL_BYTES = 1 << 17


@dataclass(frozen=True)
class RunSummary:
    """One-line summary of a run."""

    folder: str
    """Folder, relative to the searched one."""
    name: str
    """Name of the recipe, the algorithm or the trainer."""
    state: RunState
    """State of the run."""
    stage: str | None
    """Latest stage; None if the run has no stages."""
    steps: int
    """Total number of steps of all stages so far."""
    measure: str | None
    """Most informative metric of the latest stage, such as `val:accuracy`."""
    best: float | None
    """Best value of the measure."""
    best_step: int | None
    """Step of the best value in the latest stage."""
    started: str | None
    """Start of the run, in UTC, as ISO 8601."""
    age_s: float | None
    """Seconds since then."""
    reason: str | None
    """Reason of an end before the planned one, if recorded."""
    restarts: int
    """Number of restarts by `rl train --supervise`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)

    @property
    def shown_best(self) -> str:
        """Best value in readable form; "" if nothing was measured."""
        if self.measure is None:
            return ""
        return f"{self.measure} {format_measure(self.measure, self.best)}"

    @property
    def shown_age(self) -> str:
        """Age in readable form: `40 s`, `5 min`, `3 h`, `12 d`; "" if unknown."""
        if self.age_s is None:
            return ""
        for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
            # From two units on, as one is too coarse: 90 minutes would be shown as 2 h.
            if self.age_s >= 2 * size:
                return f"{self.age_s / size:.0f} {unit}"
        return f"{self.age_s:.0f} s"


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, or the folder itself, sorted by name.

    Folders inside of a run (its stages, its checkpoints) and hidden folders are not
    searched; runs may be nested up to four levels deep.
    """
    yield from _runs(root, _MOST_DEPTH)


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
        return
    # A limit, since the folder may hold anything, such as data sets with many folders.
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        # Not readable by this user, or removed in the meantime.
        return
    for entry in entries:
        # Links are not followed: they may form a circle, or list a run twice.
        if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _runs(Path(entry.path), depth - 1)


def summarize_run(folder: Path, root: Path, now: datetime | None = None) -> RunSummary:
    """Summarize a run.

    Args:
        folder: Folder of the run; missing or truncated files are tolerated.
        root: The searched folder.
        now: Reference time for ages; None: the current time.
    """
    record = read_json(folder / "run.json")
    state = run_state(folder)
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
        reason=end_reason(folder, state),
        restarts=_num_lines(folder / RESTARTS),
    )


def _num_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _age_s(started: Any, now: datetime) -> float | None:
    try:
        # Clocks of two machines may differ.
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
    """Yield the records of a file, or only the relevant ones of a long file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            place = 0
            for line in file:
                place += len(line)
                is_near_end = size <= _WHOLE_BYTES or place > size - _TAIL_BYTES
                # A search in bytes is many times faster than parsing each line.
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
