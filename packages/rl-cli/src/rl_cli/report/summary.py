"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_cli.compose import RunOutcome
from rl_cli.console import Terminal, table
from rl_cli.report.measure import format_measure, measure_of
from rl_cli.report.samples import Answer

__all__ = ["flat_metrics", "show"]


def flat_metrics(outcome: RunOutcome, started: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a run under short names.

    They are those of the last stage: its validation metrics under their own names
    (`reward`, and `accuracy` where there is one), the ones it began with as
    `accuracy_start` and `reward_start`, its training metrics as `train_reward` and so
    on, and `steps`, the steps of the last stage.

    Args:
        outcome: What the run came to.
        started: Validation metrics that the last stage began with.
    """
    *_, last = outcome.stages.values()
    found: dict[str, float] = {}
    for key, value in last["metrics"].items():
        kind, _, name = key.rpartition(":")
        found[name if kind == "val" else f"{kind}_{name}"] = value
    for name in ("accuracy", "reward"):
        if f"val:{name}" in started:
            found[f"{name}_start"] = started[f"val:{name}"]
    found["steps"] = last["steps"]
    return found


def show(
    terminal: Terminal,
    outcome: RunOutcome,
    result: Mapping[str, Any],
    starts: Mapping[str, Mapping[str, float]],
    answers: Sequence[Answer],
    plot: Path | None,
    *,
    aside: bool,
) -> None:
    """Print stages, answers before and after, and where everything is.

    Args:
        terminal: Where it is shown.
        outcome: What the run came to.
        result: The same for a program.
        starts: Validation metrics that each stage began with.
        answers: Held-out prompts with their answers.
        plot: The picture of the curve.
        aside: Print to standard error, because a program reads standard output.
    """
    rows = []
    for name, stage in outcome.stages.items():
        measure = measure_of(stage["metrics"]) or ""
        before, after = (
            format_measure(measure, metrics.get(f"val:{measure}"))
            for metrics in (starts.get(name, {}), stage["metrics"])
        )
        reason = stage["stop_reason"]
        rows.append((name, stage["steps"], measure, before, after, reason))
    columns = ["stage", "steps", "held-out", "before", "after", "ended because"]
    out = terminal.err if aside else terminal.out
    out.print(table("Stages", columns, rows))
    if answers:
        columns = ["prompt", "before", "after", "right"]
        shown = [(a.prompt, a.before, a.after, a.expected) for a in answers]
        out.print(table("Held-out prompts", columns, shown))
    lines = [
        f"{'run folder':<12}{result['run_dir']}",
        f"{'checkpoint':<12}{result['checkpoint']}",
        *([f"{'curve':<12}{plot}"] if plot is not None else []),
        f"{'wall time':<12}{result['wall_s']:.1f} s",
        f"Try it: rl generate {result['checkpoint']} PROMPT",
    ]
    for line in lines:
        out.print(line, soft_wrap=True, highlight=False, markup=False)
