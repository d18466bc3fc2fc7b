"""The curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from rl_algorithms.trainers.result import History
from rl_cli.run_config import Run
from rl_cli.run_folder import RunFolder

__all__ = ["draw", "stage_history"]

WIDTH_IN, HEIGHT_IN, DPI = 8.0, 4.0, 130


def stage_history(folder: RunFolder, name: str) -> History:
    """Read the history of a stage that has ended."""
    result = folder.stage_result(name)
    if result is None:
        return History()
    return History.read(
        Path(result["run_dir"]) / "metrics.jsonl", up_to=result["steps"]
    )


def draw(run: Run, folder: RunFolder) -> Path | None:
    """Draw accuracy and reward of all stages on one axis of steps.

    Returns:
        Path of `curve.png`, or None when the run has nothing to draw.
    """
    import matplotlib  # noqa: PLC0415  (0.5 s, and only a finished run needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI)
    offset, drawn = 0, 0
    colors = {"accuracy": "tab:blue", "reward": "tab:orange"}
    labelled: set[str] = set()
    for stage in run.stages:
        history = stage_history(folder, stage.name)
        for name, key in (("reward", "train:reward"), ("accuracy", "val:accuracy")):
            steps, values = history.column(key)
            if not steps:
                continue
            label = {"accuracy": "held-out accuracy", "reward": "training reward"}[name]
            axes.plot(
                [offset + step for step in steps],
                values,
                color=colors[name],
                alpha=0.35 if name == "reward" else 1.0,
                marker="o" if name == "accuracy" else None,
                markersize=3,
                linewidth=1 if name == "reward" else 2,
                label=None if name in labelled else label,
            )
            labelled.add(name)
            drawn += len(steps)
        last = int(history[-1]["step"]) if history else 0
        if last and len(run.stages) > 1:
            axes.axvspan(offset, offset + last, alpha=0.04 + 0.05 * (offset == 0),
                         color="gray", linewidth=0)  # fmt: skip
            axes.annotate(stage.name, (offset + last / 2, 1.02), ha="center",
                          xycoords=("data", "axes fraction"), fontsize=9)  # fmt: skip
        offset += last
    if not drawn:
        pyplot.close(figure)
        return None
    axes.set_xlabel("training step")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    axes.set_title(f"{run.name}, seed {run.seed}", loc="left", fontsize=10, pad=16)
    path = folder.path / "curve.png"
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    return path
