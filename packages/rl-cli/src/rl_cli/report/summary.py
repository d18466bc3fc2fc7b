"""The table at the end of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.figures import Figures, format_measure
from rl_algorithms.trainers.run.result import result_record
from rl_cli.console import Terminal, table
from rl_cli.report.samples import Answer
from rl_cli.run_config import Run
from rl_cli.run_stages import RunOutcome

__all__ = ["result_of", "show", "warnings_of"]

_MOST_CHARS = 60
"""Maximum length of a prompt in the command that is shown."""


def result_of(
    run: Run, outcome: RunOutcome, figures: Mapping[str, Figures], wall_s: float
) -> dict[str, Any]:
    """Return the contents of `result.json`, starting with figures of the last stage."""
    name, last = list(outcome.stages.items())[-1]
    return result_record(
        figures[name],
        steps=last["steps"],
        wall_s=round(wall_s, 2),
        best_checkpoint=last["checkpoint"],
        stop_reason=last["stop_reason"],
        run_dir=outcome.run_dir,
        model=outcome.checkpoint,
        seed=run.seed,
        metrics=last["metrics"],
        warnings=warnings_of(outcome),
        stopped_by=outcome.stopped_by,
    )


def warnings_of(outcome: RunOutcome) -> list[str]:
    """Return the warnings of the stages, with their names if there are several."""
    several = len(outcome.stages) > 1
    return [
        f"{name}: {warning}" if several else warning
        for name, stage in outcome.stages.items()
        # Runs of older versions have none.
        for warning in stage.get("warnings", ())
    ]


def show(
    terminal: Terminal,
    outcome: RunOutcome,
    result: Mapping[str, Any],
    figures: Mapping[str, Figures],
    answers: Sequence[Answer],
    plot: Path | None,
    *,
    aside: bool,
) -> None:
    """Print stages, answers from before and after, and the locations of files.

    Args:
        terminal: The terminal.
        outcome: Result of the run.
        result: The same for programs.
        figures: Figures of each stage's measure.
        answers: Held-out prompts with their answers.
        plot: Image of the curve.
        aside: Print to standard error, to keep standard output free for a program.
    """
    rows = []
    for name, stage in outcome.stages.items():
        found = figures[name]
        measure = found.measure or ""
        # A first value from a later step is not from before the training.
        before, after = (
            format_measure(measure, value)
            for value in (found.start if found.start_step == 0 else None, found.end)
        )
        reason = stage["stop_reason"]
        rows.append((name, stage["steps"], measure, before, after, reason))
    columns = ["stage", "steps", "measure", "before", "after", "ended because"]
    out = terminal.err if aside else terminal.out
    out.print(table("Stages", columns, rows))
    if answers:
        columns = ["prompt", "before", "after", "right"]
        shown = [(a.prompt, a.before, a.after, a.expected) for a in answers]
        out.print(table("Held-out prompts", columns, shown))
    lines = [
        *_best(list(figures.values())[-1]),
        *(f"{'warned':<12}{warning}" for warning in result["warnings"]),
        f"{'run folder':<12}{result['run_dir']}",
        f"{'checkpoint':<12}{result['checkpoint']}",
        *([f"{'curve':<12}{plot}"] if plot is not None else []),
        f"{'wall time':<12}{result['wall_s']:.1f} s",
        f"See it: rl report {shlex.quote(result['run_dir'])}",
        f"Try it: rl generate {result['checkpoint']} {_prompt_of(answers)}",
    ]
    for line in lines:
        # Without markup: paths and warnings may hold brackets.
        out.print(line, soft_wrap=True, highlight=False, markup=False)


def _prompt_of(answers: Sequence[Answer]) -> str:
    """Return a prompt for a command line: that of the first answer if it is short."""
    prompt = answers[0].prompt if answers else ""
    is_short = 0 < len(prompt) <= _MOST_CHARS and prompt.isprintable()
    return shlex.quote(prompt) if is_short else "PROMPT"


def _best(figures: Figures) -> list[str]:
    """Return lines with the best value of a stage, and whether it learnt anything."""
    if figures.measure is None:
        return []
    value = format_measure(figures.measure, figures.best)
    said = [f"{'best':<12}{figures.measure} {value} at step {figures.best_step}"]
    return [*said, *([figures.nothing_learnt] if figures.nothing_learnt else [])]
