"""Summary of a run on a terminal, printed once or updated in place until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rl_algorithms.trainers.run.figures import Figures, format_measure
from rl_cli.console import table
from rl_cli.report.live_runs import LiveRuns
from rl_cli.report.metric_table import MetricTable
from rl_cli.report.page_data import stage_figures
from rl_cli.report.run_reader import ReadRun, ReadStage

__all__ = ["essentials", "show"]

_METRICS = (
    "train:reward",
    "train:loss",
    "val:accuracy",
    "val:reward",
    "val:val_loss",
    "train:kl_penalty",
    "train:approx_entropy",
    "train:mean_gen_tokens_per_sample",
    "train:truncation_rate",
    "train:grad_norm",
    "train:lr",
    "timing:total_step_time",
    "performance:tokens_per_sec",
)
_NUM_ANSWERS = 3
_LONGEST = 240
_RECENT = 20
_STYLES = {
    "failed": "bold red",
    "interrupted": "yellow",
    "paused": "yellow",
    "finished": "green",
}


def show(live: LiveRuns, console: Console, *, once: bool) -> None:
    """Show runs on a console.

    Args:
        live: The runs.
        console: The console.
        once: Print the summary and return; False: update it in place until Ctrl-C.
    """
    if once:
        console.print(essentials(live), soft_wrap=False)
        return
    try:
        # Redrawn only when something has changed, which costs nothing while a step
        # runs.
        with Live(essentials(live), console=console, auto_refresh=False) as screen:
            while True:
                time.sleep(live.poll_s)
                before = live.version
                live.page()
                if live.version != before:
                    screen.update(essentials(live), refresh=True)
    except KeyboardInterrupt:
        # The usual way out; the last summary stays on the screen.
        pass


def essentials(live: LiveRuns) -> RenderableType:
    """Return the state, step, metrics, warnings and latest answers of the runs."""
    parts = [part for run in live.runs for part in _run(run)]
    return Group(*parts, *_answers(live.newest_answers(_NUM_ANSWERS)))


def _run(run: ReadRun) -> Iterator[RenderableType]:
    name = str(run.record.get("name", ""))
    line = Text(f"{run.folder}  {plain(name)}  ", style="bold")
    line.append(run.state, style=_STYLES.get(run.state, "cyan"))
    if run.reason:
        line.append(f": {plain(run.reason)}")
    yield line
    for stage in run.stages:
        yield Text(f"{stage.name}: {_progress(run, stage)}")
    if run.stages and (rows := list(_rows(run.stages[-1].metrics))):
        columns = ["metric", "now", f"mean of {_RECENT}", "lowest", "highest", "step"]
        yield table(f"Metrics of {run.stages[-1].name}", columns, rows)
    if run.logs.notes:
        last = run.logs.notes[-1]
        count = sum(note.count for note in run.logs.notes)
        said = f"{count} warnings and errors; {last.level}: {plain(last.message)}"
        yield Text(said[:_LONGEST], style="yellow")


def _progress(run: ReadRun, stage: ReadStage) -> str:
    """Describe the progress of a stage: steps, speed and remaining time."""
    table, total = stage.metrics, stage.total_steps
    parts = [f"step {stage.num_steps:,}" + (f" of {total:,}" if total else "")]
    if (seconds := _seconds_per_step(table)) is not None:
        parts.append(f"{seconds:.3g} s per step")
        left = (total or 0) - stage.num_steps
        if left > 0 and run.state == "running":
            parts.append(f"{_duration(left * seconds)} left")
    figures: Figures = stage_figures(table)
    if figures.measure is not None:
        best = format_measure(figures.measure, figures.best)
        parts.append(f"best {figures.measure} {best} at step {figures.best_step}")
    return ", ".join(parts)


def _seconds_per_step(table: MetricTable) -> float | None:
    # The recent speed: steps may get longer or shorter during a run.
    steps = sorted(table.times)[-_RECENT:]
    if len(steps) < 2 or steps[-1] == steps[0]:
        return None
    return (table.times[steps[-1]] - table.times[steps[0]]) / (steps[-1] - steps[0])


def _duration(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _rows(
    metrics: MetricTable,
) -> Iterator[tuple[str, float, float, float, float, int]]:
    for name in _METRICS:
        steps, values = metrics.points(name)
        if steps:
            recent = values[-_RECENT:]
            mean = sum(recent) / len(recent)
            yield name, values[-1], mean, min(values), max(values), steps[-1]


def _answers(answers: list[dict[str, Any]]) -> Iterator[RenderableType]:
    for answer in answers:
        reward = answer.get("reward")
        shown = "" if reward is None else f", reward {reward:.4g}"
        yield Text(f"answer of step {answer['step']}{shown}", style="bold")
        for name in ("prompt", "response"):
            text = plain(str(answer.get(name, "")))
            cut = f"{text[:_LONGEST]} …" if len(text) > _LONGEST else text
            yield Text(f"  {name}: {cut}")


def plain(text: str) -> str:
    """Return a text as one line without control characters for the terminal."""
    # A model's text may contain escape sequences that reprogram a terminal.
    return "".join(c if c.isprintable() else " " for c in text)
