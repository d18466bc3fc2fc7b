"""Summary of a run on a terminal, printed once or updated in place until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
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
_FRAME = 6
"""Lines of a table besides its rows: title, head, borders, what it leaves out."""
_TALL = 40
"""Lines from which on several answers are shown."""
_STYLES = {
    "failed": "bold red",
    "interrupted": "yellow",
    "stopped": "yellow",
    "paused": "yellow",
    "finished": "green",
}


def show(live: LiveRuns, console: Console, *, once: bool) -> None:
    """Show runs on a console.

    Args:
        live: The runs.
        console: The console.
        once: Print the summary and return; False: update it in place until Ctrl-C, cut
            to the height of the console.
    """
    if once:
        console.print(essentials(live), soft_wrap=False)
        return
    try:
        # Redrawn only when something has changed, which costs nothing while a step
        # runs.
        shown = _OnOneScreen(live)
        with Live(shown, console=console, auto_refresh=False) as screen:
            while True:
                time.sleep(live.poll_s)
                before = live.version
                live.page()
                if live.version != before:
                    screen.update(shown, refresh=True)
    except KeyboardInterrupt:
        # The usual way out; the last summary stays on the screen.
        pass


def essentials(live: LiveRuns) -> RenderableType:
    """Return the state, step, warnings, metrics and latest answers of the runs."""
    parts: list[RenderableType] = []
    for run in live.runs:
        parts += _header(run)
        if (metrics := _metrics(run)) is not None:
            parts.append(metrics)
    for answer in live.newest_answers(_NUM_ANSWERS):
        parts += _answer(answer)
    return Group(*parts)


class _OnOneScreen:
    """The essentials in as many lines as the console has.

    States, progress and warnings come first, then the newest answer, in one line for
    each of its texts; the metrics get the remaining lines.
    """

    def __init__(self, live: LiveRuns) -> None:
        self._live = live

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Render what fits."""

        def lines(parts: Sequence[RenderableType]) -> int:
            return len(console.render_lines(Group(*parts), options, pad=False))

        headers = [list(_header(run)) for run in self._live.runs]
        # The cursor is below the last line.
        left = console.height - 1 - sum(map(lines, headers))
        answers = [
            [
                Text(one.plain, one.style, no_wrap=True, overflow="ellipsis")
                for one in said
            ]
            for said in map(_answer, self._live.newest_answers(_NUM_ANSWERS))
        ]
        shown: list[RenderableType] = []
        for said in answers[: 1 if left < _TALL else None]:
            if left - len(said) >= _FRAME + 1:
                shown += said
                left -= len(said)
        share = left // max(len(headers), 1)
        for run, header in zip(self._live.runs, headers, strict=True):
            yield from header
            if (metrics := _metrics(run, share - _FRAME)) is not None:
                yield metrics
        yield from shown


def _header(run: ReadRun) -> Iterator[Text]:
    """Yield lines with the state, the progress and the last warning."""
    name = str(run.record.get("name", ""))
    line = Text(f"{run.folder}  {plain(name)}  ", style="bold")
    line.append(run.state, style=_STYLES.get(run.state, "cyan"))
    if run.reason:
        line.append(f": {plain(run.reason)}")
    yield line
    for stage in run.stages:
        yield Text(f"{stage.name}: {_progress(run, stage)}")
    if run.logs.notes:
        last = run.logs.notes[-1]
        count = sum(note.count for note in run.logs.notes)
        said = f"{count} warnings and errors; {last.level}: {plain(last.message)}"
        yield Text(said[:_LONGEST], style="yellow")


def _metrics(run: ReadRun, most: int | None = None) -> RenderableType | None:
    """Return a table of the metrics of the latest stage, None if there are none.

    Args:
        run: The run.
        most: Maximum number of rows; None: all.
    """
    rows = list(_rows(run.stages[-1].metrics)) if run.stages else []
    rows = rows if most is None else rows[: max(most, 0)]
    if not rows:
        return None
    columns = ["metric", "now", f"mean of {_RECENT}", "lowest", "highest", "step"]
    title = f"Metrics of {run.stages[-1].name}"
    return table(title, columns, rows, spare=("step", "lowest", "highest"))


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


def _answer(answer: Mapping[str, Any]) -> list[Text]:
    """Return lines with the reward and the texts of an answer."""
    reward = answer.get("reward")
    shown = "" if reward is None else f", reward {reward:.4g}"
    lines = [Text(f"answer of step {answer['step']}{shown}", style="bold")]
    for name in ("prompt", "response"):
        text = plain(str(answer.get(name, "")))
        cut = f"{text[:_LONGEST]} …" if len(text) > _LONGEST else text
        lines.append(Text(f"  {name}: {cut}"))
    return lines


def plain(text: str) -> str:
    """Return a text as one line without control characters for the terminal."""
    # A model's text may contain escape sequences that reprogram a terminal.
    return "".join(c if c.isprintable() else " " for c in text)
