"""Data of the page of a report, as JSON values."""

from __future__ import annotations

import functools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.figures import Figures, measure_of
from rl_algorithms.trainers.run.history import History
from rl_cli.report.config_rows import config_values, recipe_values
from rl_cli.report.metric_table import MetricTable, thinned
from rl_cli.report.run_reader import ReadRun, ReadStage, read_json
from rl_cli.report.step_times import phase_times
from rl_cli.report.trust_data import confirmed_weights, mismatch_limit, sampling_age
from rl_cli.run_folder import RunFolder
from rl_distributed.redaction import redacted

__all__ = ["Answers", "Timelines", "page_data"]

Answers = Callable[[ReadStage, str], list[dict[str, Any]]]
"""Function of a stage and a name prefix that returns where its answers are."""

Timelines = Callable[[ReadStage, str], dict[str, Any] | None]
"""Function of a stage and a name prefix that returns where its time line is."""

_MOST_NUMBERS = 150_000
"""Maximum number of points of all curves of a page, about ten bytes each."""
_MOST_POINTS, _LEAST_POINTS = 2000, 120
_MOST_TIMES = 1000
_DIGITS = 6


def page_data(
    runs: Sequence[ReadRun],
    answers: Answers,
    timelines: Timelines = lambda stage, key: None,
) -> dict[str, Any]:
    """Return all data of the page except for the answers and time lines.

    Args:
        runs: The runs; the others are compared with the first one.
        answers: Function that locates the answers of a stage.
        timelines: Function that locates its time line.
    """
    num_curves = sum(len(s.metrics.columns) for run in runs for s in run.stages)
    limit = _MOST_NUMBERS // max(num_curves, 1)
    limit = min(max(limit, _LEAST_POINTS), _MOST_POINTS)
    names = _names(runs)
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": [
            _run(run, name, f"r{number}", limit, answers, timelines)
            for number, (run, name) in enumerate(zip(runs, names, strict=True))
        ],
    }


def _names(runs: Sequence[ReadRun]) -> list[str]:
    """Return the name of each run's folder, with as many parents as needed."""
    folders = [run.folder.resolve() for run in runs]
    depth = 1
    while depth < max(len(folder.parts) for folder in folders):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            return names
        depth += 1
    return [str(folder) for folder in folders]


def _run(
    run: ReadRun,
    name: str,
    key: str,
    limit: int,
    answers: Answers,
    timelines: Timelines,
) -> dict[str, Any]:
    record, result = run.record, run.result
    return {
        "name": name,
        "what": str(record.get("name", "")),
        "kind": str(record.get("kind", "")),
        "state": run.state,
        "reason": run.reason,
        "started": _text(record.get("started")),
        "versions": _texts(record.get("versions")),
        "command": _command(run),
        "started_by": _text(record.get("command")),
        "machine": _machine(record.get("machine")),
        "result": redacted(
            {k: v for k, v in result.items() if isinstance(v, str | int | float | list)}
        ),
        "figures": _figures(run),
        "answers": _answers(run),
        "recipe": [value.to_dict() for value in recipe_values(run)],
        "logs": redacted(run.logs.to_dict()),
        "data": redacted(run.logs.data),
        "stages": [
            _stage(run, stage, f"{key}s{number}", limit, answers, timelines)
            for number, stage in enumerate(run.stages)
        ],
    }


def _stage(
    run: ReadRun,
    stage: ReadStage,
    key: str,
    limit: int,
    answers: Answers,
    timelines: Timelines,
) -> dict[str, Any]:
    table = stage.metrics
    times = phase_times(table)
    return {
        "name": stage.name,
        "algorithm": stage.algorithm,
        "offset": stage.offset,
        "steps": stage.num_steps,
        "starts": table.num_starts,
        "stop_reason": _text(stage.result.get("stop_reason")),
        "checkpoints": list(stage.checkpoints),
        "best": _best_step(stage),
        "curves": {
            name: _rounded(thinned(table.points(name), limit))
            for name in sorted(table.columns)
        },
        "totals": {
            name: table.total(name) for name in table.columns if _is_count(name)
        },
        "nonfinite": table.num_nonfinite,
        "age": sampling_age(table),
        "weights": confirmed_weights(stage.folder),
        "mismatch_limit": mismatch_limit(table.config),
        "times": _times(table),
        "phases": None if times is None else _rounded_tree(times.to_dict()),
        "updates": redacted([dict(update) for update in stage.updates]),
        "config": [value.to_dict() for value in config_values(run, stage)],
        "samples": answers(stage, key),
        "timeline": timelines(stage, key),
    }


def _is_count(name: str) -> bool:
    """Return True if the sum of a metric over the steps is meaningful."""
    last = name.rpartition(":")[2]
    return last.startswith("num_") or last in ("skipped_steps",)


def _figures(run: ReadRun) -> dict[str, Any]:
    """Return figures of the most informative measure of each stage."""
    return {stage.name: asdict(stage_figures(stage.metrics)) for stage in run.stages}


def stage_figures(table: MetricTable) -> Figures:
    """Return figures of the most informative measure of a stage."""
    # The other columns have no part in it, and would take most of an update's time.
    measure = measure_of(table.columns)
    if measure is None:
        return Figures()
    points = zip(*table.points(measure), strict=True)
    return Figures.of(History({"step": step, measure: v} for step, v in points))


def _answers(run: ReadRun) -> list[dict[str, str]]:
    """Return held-out prompts with the answers before and after the run."""
    found = read_json(run.folder / "samples.json").get("samples")
    if not isinstance(found, list):
        return []
    return [
        {key: str(value) for key, value in answer.items() if value is not None}
        for answer in found
        if isinstance(answer, Mapping)
    ]


def _command(run: ReadRun) -> str | None:
    """Return the command that continues the run; None for runs from Python."""
    if run.record.get("kind") not in ("recipe", "algorithm"):
        return None
    return RunFolder(run.folder).resume_command(_given_name(run.record))


def _given_name(record: Mapping[str, Any]) -> str:
    """Return the recipe or algorithm as given: a path, where the name is its stem."""
    name = str(record.get("name", ""))
    try:
        given = shlex.split(str(record.get("command", "")))
    except ValueError:  # Hidden secrets may have left a quote without its partner.
        return name
    return next((text for text in given if Path(text).stem == name), name)


def _best_step(stage: ReadStage) -> int | None:
    found = stage.result.get("best_checkpoint")
    step = str(found).rpartition("step_")[2] if isinstance(found, str) else ""
    return int(step) if step.isdigit() else None


def _times(table: MetricTable) -> list[list[float]]:
    """Return a sample of steps with their times; the page interpolates."""
    steps = sorted(table.times)
    stride = max(math.ceil(len(steps) / _MOST_TIMES), 1)
    # With the last step, which the stride may miss and the page shows as the present.
    kept = sorted({*steps[::stride], *steps[-1:]})
    return [[float(s) for s in kept], [round(table.times[s], 2) for s in kept]]


def _rounded(points: tuple[list[int], list[float]]) -> list[list[float]]:
    steps, values = points
    return [[*steps], [_short(value) for value in values]]


def _rounded_tree(value: Any) -> Any:
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping):
        return {key: _rounded_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded_tree(item) for item in value]
    return value


# Formatting takes most of an update's time, and most numbers are those of the last one.
@functools.lru_cache(maxsize=_MOST_NUMBERS)
def _short(value: float) -> float:
    """Return a number rounded to the digits that a screen can show."""
    rounded = float(f"{value:.{_DIGITS}g}")
    # Shorter in JSON; beyond 1e15 the digits of an int would be longer.
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _machine(value: Any) -> str | None:
    """Describe the machine in one line."""
    if not isinstance(value, Mapping):
        return None
    cores, memory, gpus = (value.get(k) for k in ("cores", "memory_bytes", "gpus"))
    parts = [f"{cores} cores"] if isinstance(cores, int) else []
    if isinstance(memory, int):
        parts.append(f"{memory / (1 << 30):.0f} GiB")
    if isinstance(gpus, list):
        counts = Counter(str(gpu) for gpu in gpus)
        named = [f"{count} x {gpu}" for gpu, count in counts.items()]
        parts += named or ["no GPU"]
    return ", ".join([*parts, *filter(None, [_text(value.get("system"))])]) or None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {str(key): str(item) for key, item in value.items()}
