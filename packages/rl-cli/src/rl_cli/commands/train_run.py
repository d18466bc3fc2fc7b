"""The work of `rl train`, once its arguments are known."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algorithms.registry import get_algorithm
from rl_algorithms.trainers.progress import ProgressDisplay
from rl_algorithms.trainers.run.signals import Interrupted, SignalGuard
from rl_algorithms.trainers.setup.early_ray import loaded_beside_ray
from rl_cli.console import Terminal
from rl_cli.run_config import Run, check_run, load_run, run_from_dict
from rl_cli.run_folder import RunFolder
from rl_distributed.logs import configure_logging

if TYPE_CHECKING:
    from rl_cli.run_stages import RunOutcome

__all__ = ["run_and_report"]


def run_and_report(
    name: str,
    config: Path | None,
    overrides: Sequence[str],
    guard: SignalGuard,
    *,
    found: RunFolder | None,
    overwrite: bool = False,
    terminal: Terminal,
    as_json: bool,
    debug: bool,
) -> dict[str, Any]:
    """Carry out a run and show its result.

    Args:
        name: Recipe or algorithm.
        config: YAML file of an algorithm.
        overrides: Overrides of keys.
        guard: Signal guard, checked between the parts of the run.
        found: Folder of the run to resume; None for a new run.
        overwrite: Allow a new run to delete the one in its folder.
        terminal: Terminal for the progress and the report.
        as_json: Keep standard output free for a program; show the report elsewhere.
        debug: Log everything.

    Returns:
        The contents of `result.json`: figures of the last stage, then everything else.

    Raises:
        Interrupted: A signal arrived; if anything was saved, a note has the command
            that continues the run.
        Exception: The run failed; a note has that command as well.
    """
    began_s = time.monotonic()
    configure_logging("debug" if debug else "warning")
    guard.raise_pending()
    run, folder = _run_and_folder(name, config, overrides, found, overwrite)
    with folder, _naming_the_resume(name, folder):
        configure_logging(
            "debug" if debug else "info",
            folder.path / "logs" / "run.jsonl",
            console_level="debug" if debug else "warning",
        )
        terminal.note(f"{run.title}\nrun folder {folder.path}")
        display = ProgressDisplay(terminal.err)
        resume = found is not None
        # Loaded last, which takes seconds: mistakes are reported at once.
        first = run.stages[0]
        load = functools.partial(_carry_out, first.algorithm)
        with loaded_beside_ray(load, first.config.cluster, guard) as carry_out:
            guard.raise_pending()
            with display.running():
                outcome = carry_out(run, folder, display, guard, resume=resume)
        if outcome.stopped_by is not None:
            terminal.note(f"Stopped by {outcome.stopped_by}.")
            terminal.note(f"Continue with: {folder.resume_command(name)}")
            # Later stages have not run, so there is nothing to report about them.
            run = replace(run, stages=run.stages[: len(outcome.stages)])
        return _report(run, folder, outcome, terminal, guard, began_s, aside=as_json)


def _carry_out(algorithm: str) -> Callable[..., RunOutcome]:
    """Import the code that carries out a run, and its first trainer."""
    from rl_cli.run_stages import carry_out  # noqa: PLC0415

    get_algorithm(algorithm)
    return carry_out


def _report(
    run: Run,
    folder: RunFolder,
    outcome: RunOutcome,
    terminal: Terminal,
    guard: SignalGuard,
    began_s: float,
    *,
    aside: bool,
) -> dict[str, Any]:
    """Show the result of a run, and store it in its folder."""
    from rl_cli.report import curve, samples, summary  # noqa: PLC0415

    figures = curve.stage_figures(run, folder)
    wall_s = time.monotonic() - began_s
    result = summary.result_of(run, outcome, figures, wall_s)
    answers = samples.answer(run, folder, outcome)
    guard.raise_pending()
    plot = curve.draw(run, folder) if run.report.plot else None
    summary.show(terminal, outcome, result, figures, answers, plot, aside=aside)
    folder.write("result.json", result)
    return result


@contextmanager
def _naming_the_resume(name: str, folder: RunFolder) -> Iterator[None]:
    """Add the command that continues the run to any exception that ends it."""
    try:
        yield
    except BaseException as error:
        if _can_be_resumed(error, folder):
            error.add_note(f"Continue with: {folder.resume_command(name)}")
        raise


def _can_be_resumed(error: BaseException, folder: RunFolder) -> bool:
    if isinstance(error, Interrupted):
        return error.checkpoint_path is not None
    # Without any progress, there is nothing to continue from.
    return folder.has_progress()


def _run_and_folder(
    name: str,
    config: Path | None,
    overrides: Sequence[str],
    found: RunFolder | None,
    overwrite: bool,
) -> tuple[Run, RunFolder]:
    if found is not None:
        return run_from_dict(found.source(name, overrides), overrides), found
    run = load_run(name, config, overrides)
    check_run(run)
    return run, RunFolder.create(
        run.name, run.output_dir, run.source, overwrite=overwrite
    )
