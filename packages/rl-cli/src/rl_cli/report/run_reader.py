"""Reading the folder of a run, even if it is incomplete.

```
run.json, result.json, .run.ended          of the run
  metrics.jsonl updates.jsonl timeline.jsonl checkpoints/
                             of each stage: stages/<name>/, or the run
logs/*.jsonl                               warnings and errors
```
Missing or truncated files are tolerated, so that runs in progress, killed runs and runs
of older versions can be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.settings.config_updates import UPDATES
from rl_cli.report.log_lines import LogNotes
from rl_cli.report.metric_table import MetricTable
from rl_distributed.errors import ConfigError
from rl_distributed.metrics.sinks.jsonl import read_records
from rl_distributed.runs.ending import RunState, read_ending, run_state
from rl_distributed.runs.folder import CHECKPOINTS

__all__ = [
    "ReadRun",
    "ReadStage",
    "end_reason",
    "read_json",
    "read_run",
    "stage_folders",
]

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class ReadStage:
    """One stage of a run, or a whole run without stages."""

    name: str
    """Name of the stage, or of the algorithm if the run has no stages."""
    algorithm: str | None
    """Name of the algorithm or preset, if known."""
    folder: Path
    """Folder of its files."""
    metrics: MetricTable
    """All logged metrics."""
    offset: int
    """Number of steps in earlier stages."""
    result: Mapping[str, Any]
    """Contents of its `result.json`; {} while it is in progress."""
    checkpoint_paths: Mapping[int, Path]
    """Folders of the existing checkpoints by step, in order."""
    updates: tuple[Mapping[str, Any], ...]
    """Changes of the configuration during the stage."""

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Steps of the existing checkpoints."""
        return tuple(self.checkpoint_paths)

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return self.metrics.last_step

    @property
    def total_steps(self) -> int | None:
        """Step limit, a key of one section of the configuration; None if unknown."""
        for update in reversed(self.updates):
            changes = update.get("changes")
            if isinstance(changes, Mapping) and (found := _step_limits(changes)):
                return found[0]
        sections = [
            one for one in self.metrics.config.values() if isinstance(one, dict)
        ]
        return next((limit for one in sections for limit in _step_limits(one)), None)


def _step_limits(values: Mapping[str, Any]) -> list[int]:
    return [
        value
        for key, value in values.items()
        if key.rpartition(".")[2] == "max_num_steps" and isinstance(value, int)
    ]


@dataclass(frozen=True)
class ReadRun:
    """A run as read from its folder."""

    folder: Path
    record: Mapping[str, Any]
    """Contents of `run.json`: `kind`, `name`, `config`, `versions`, `started`."""
    state: RunState
    """State of the run."""
    reason: str | None
    """Reason of a premature end."""
    result: Mapping[str, Any]
    """Contents of `result.json`; {} if it is missing."""
    stages: tuple[ReadStage, ...]
    """Stages that have started, in order."""
    logs: LogNotes = field(default_factory=LogNotes)
    """Warnings and errors."""


def read_run(
    folder: Path, read_metrics: Callable[[Path], MetricTable] = MetricTable.read
) -> ReadRun:
    """Read the folder of a run.

    Args:
        folder: Folder with a `run.json`, as printed by the run at its start.
        read_metrics: Function that reads the metrics file of a stage, if it exists.

    Raises:
        ConfigError: It is not the folder of a run.
    """
    record = read_json(folder / "run.json")
    if not record:
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a run (it has no readable "
            "run.json): give the folder that the run printed at its start; `rl runs` "
            "lists those below runs/"
        )
    state = run_state(folder)
    return ReadRun(
        folder=folder,
        record=record,
        state=state,
        reason=end_reason(folder, state),
        result=read_json(folder / "result.json"),
        stages=tuple(_stages(folder, record, read_metrics)),
        logs=LogNotes.read(folder / "logs"),
    )


def end_reason(folder: Path, state: RunState) -> str | None:
    """Return why a run ended before its planned end; None: it did not, or is unknown.

    Args:
        folder: Folder of the run.
        state: State of the run.
    """
    if state == "stopped":
        found = read_json(folder / "result.json").get("stop_reason")
        return found if isinstance(found, str) else None
    ending = read_ending(folder)
    # Not the reason of an earlier end, where the state has changed since.
    return ending.reason if ending and state == ending.state else None


def stage_folders(folder: Path, record: Mapping[str, Any]) -> dict[str, Path]:
    """Return the folders of the stages that have started, by name, in order."""
    name = str(record.get("name", folder.name))
    if not (folder / "stages").is_dir():
        return {name: folder}
    config = record.get("config")
    stages = config.get("stages") if isinstance(config, Mapping) else None
    # From the recipe, which has their order; a listing of the folder does not.
    names = list(stages) if isinstance(stages, Mapping) else []
    found = {name: folder / "stages" / name for name in names}
    return {name: path for name, path in found.items() if path.is_dir()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file with a mapping; return {} if it is missing or truncated."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stages(
    folder: Path,
    record: Mapping[str, Any],
    read_metrics: Callable[[Path], MetricTable],
) -> Iterator[ReadStage]:
    offset = 0
    for name, path in stage_folders(folder, record).items():
        metrics = read_metrics(path / "metrics.jsonl")
        yield ReadStage(
            name=name,
            algorithm=_algorithm(name, record),
            folder=path,
            metrics=metrics,
            offset=offset,
            result=read_json(path / "result.json"),
            checkpoint_paths=_checkpoints(path, metrics.config),
            updates=tuple(_records(path / UPDATES)),
        )
        # Each stage counts its own steps, and the pages show them on one axis.
        offset += metrics.last_step


def _algorithm(stage: str, record: Mapping[str, Any]) -> str | None:
    if record.get("kind") != "recipe":
        name = record.get("name")
        return str(name) if isinstance(name, str) else None
    config = record.get("config")
    stages = config.get("stages") if isinstance(config, Mapping) else None
    settings = stages.get(stage) if isinstance(stages, Mapping) else None
    found = settings.get("algorithm", stage) if isinstance(settings, Mapping) else stage
    return str(found)


def _checkpoints(folder: Path, config: Mapping[str, Any]) -> dict[int, Path]:
    section = config.get("checkpointing")
    elsewhere = section.get("checkpoint_dir") if isinstance(section, Mapping) else None
    places = [Path(elsewhere)] if isinstance(elsewhere, str) else []
    found = {
        int(match.group(1)): path
        for place in (folder / CHECKPOINTS, *places)
        if place.is_dir()
        for path in place.iterdir()
        if (match := _STEP.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from read_records(path)
