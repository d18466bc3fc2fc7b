"""The learning curve of a run as an image."""

from __future__ import annotations

from pathlib import Path

from rl_algorithms.trainers.run.curves import Mark, draw_curves
from rl_algorithms.trainers.run.figures import Figures
from rl_algorithms.trainers.run.history import History
from rl_cli.run_config import Run
from rl_cli.run_folder import RunFolder

__all__ = ["draw", "stage_figures", "stage_history"]


def stage_history(folder: RunFolder, name: str) -> History:
    """Read the history of a finished stage."""
    result = folder.stage_result(name)
    if result is None:
        return History()
    return History.read(
        Path(result["run_dir"]) / "metrics.jsonl", up_to=result["steps"]
    )


def stage_figures(run: Run, folder: RunFolder) -> dict[str, Figures]:
    """Return figures of the most informative measure of each stage."""
    return {s.name: Figures.of(stage_history(folder, s.name)) for s in run.stages}


def draw(run: Run, folder: RunFolder) -> Path | None:
    """Draw rewards and validations of all stages on a common axis of steps.

    Returns:
        Path of `curve.png`, or None if there is nothing to draw.
    """
    last = run.stages[-1].name
    result = folder.stage_result(last)
    step = Path(result["checkpoint"]).name.removeprefix("step_") if result else ""
    return draw_curves(
        {stage.name: stage_history(folder, stage.name) for stage in run.stages},
        folder.path / "curve.png",
        title=f"{run.name}, seed {run.seed}",
        best=Mark(last, int(step)) if step.isdigit() else None,
    )
