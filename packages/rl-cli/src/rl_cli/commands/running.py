"""What `rl train` does once its arguments are known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.signals import Interrupted, SignalGuard
from rl_cli.compose import RunOutcome, carry_out
from rl_cli.console import Terminal
from rl_cli.display import RunDisplay
from rl_cli.report import curve, samples, summary
from rl_cli.run_config import Run, check_run, load_run
from rl_cli.run_folder import RunFolder
from rl_distributed import ConfigError, configure_logging

__all__ = ["run_and_report"]


def run_and_report(
    name: str,
    config: Path | None,
    overrides: Sequence[str],
    guard: SignalGuard,
    *,
    resume: str | None,
    quiet: bool,
    as_json: bool,
    debug: bool,
) -> dict[str, Any]:
    """Carry out a run and show what it came to.

    Args:
        name: Recipe or algorithm.
        config: YAML file of an algorithm.
        overrides: Overrides of keys.
        guard: Asked between the parts of the run whether a signal came.
        resume: None for a new run, "" for the newest of that name, else a folder.
        quiet: Show no progress.
        as_json: A program reads standard output; show the report elsewhere.
        debug: Log everything.

    Returns:
        `run_dir`, `checkpoint`, `wall_s`, `seed` and `metrics`, as JSON values.

    Raises:
        Interrupted: A signal came; where something was saved, a note tells the command
            that goes on.
    """
    began_s = time.monotonic()
    configure_logging("debug" if debug else "warning")
    terminal = Terminal(quiet=quiet)
    guard.raise_pending()
    run, folder = _run_and_folder(name, config, overrides, resume)
    configure_logging(
        "debug" if debug else "info",
        folder.path / "logs" / "run.jsonl",
        console_level="debug" if debug else "warning",
    )
    terminal.note(f"{run.title}\nrun folder {folder.path}")
    display = RunDisplay(terminal)
    guard.raise_pending()
    try:
        with display.running():
            outcome = carry_out(run, folder, display, guard, resume=resume is not None)
    except Interrupted as error:
        if error.checkpoint_path is not None:
            error.add_note(f"Go on with: rl train {name} --resume {folder.path}")
        raise
    starts = {stage.name: _started(folder, stage.name) for stage in run.stages}
    wall_s = time.monotonic() - began_s
    result = _result(run, outcome, starts[run.stages[-1].name], wall_s)
    answers = samples.answer(run, folder, outcome)
    guard.raise_pending()
    plot = curve.draw(run, folder) if run.report.plot else None
    summary.show(terminal, outcome, result, starts, answers, plot, aside=as_json)
    folder.write("result.json", result)
    return result


def _run_and_folder(
    name: str, config: Path | None, overrides: Sequence[str], resume: str | None
) -> tuple[Run, RunFolder]:
    if resume is None:
        run = load_run(name, config, overrides)
        check_run(run)
        return run, RunFolder.create(run)
    if overrides or config is not None:
        raise ConfigError(
            "--resume goes on with a run as it was configured: leave the overrides "
            f"({', '.join(overrides) or '--config'}) away, or start a new run."
        )
    folder = RunFolder.find(name, resume)
    run = folder.run()
    if run.name != Path(name).stem:
        raise ConfigError(
            f"{folder.path} is a run of {run.name!r}, not of {name!r}; name that one."
        )
    return run, folder


def _started(folder: RunFolder, stage: str) -> dict[str, float]:
    """Return the validation metrics that a stage began with."""
    for record in curve.stage_history(folder, stage):
        found = {key: value for key, value in record.items() if key.startswith("val:")}
        if found:
            return found if record["step"] == 0 else {}
    return {}


def _result(
    run: Run, outcome: RunOutcome, started: dict[str, float], wall_s: float
) -> dict[str, Any]:
    return {
        "run_dir": str(outcome.run_dir),
        "checkpoint": str(outcome.checkpoint),
        "wall_s": round(wall_s, 2),
        "seed": run.seed,
        "metrics": summary.flat_metrics(outcome, started),
    }
