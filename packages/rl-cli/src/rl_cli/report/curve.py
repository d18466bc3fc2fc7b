"""The curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """Draw rewards, and what was measured on held-out data, on one axis of steps.

    Held-out accuracy is drawn where any stage has it, otherwise the held-out reward.

    Returns:
        Path of `curve.png`, or None when the run has nothing to draw.
    """
    import matplotlib  # noqa: PLC0415  (0.5 s, and only a finished run needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI)
    drawn = _draw_stages(
        axes, {stage.name: stage_history(folder, stage.name) for stage in run.stages}
    )
    if not drawn:
        pyplot.close(figure)
        return None
    axes.set_xlabel("training step")
    if all(0 <= value <= 1 for value in drawn):
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    axes.set_title(f"{run.name}, seed {run.seed}", loc="left", fontsize=10, pad=16)
    path = folder.path / "curve.png"
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _draw_stages(axes: Any, histories: Mapping[str, History]) -> list[float]:
    """Draw the stages one behind the other; return all values that were drawn."""
    names = {name for history in histories.values() for r in history for name in r}
    held_out = "accuracy" if "val:accuracy" in names else "reward"
    styles: dict[str, dict[str, Any]] = {
        "train:reward": {"color": "tab:orange", "alpha": 0.35, "linewidth": 1},
        f"val:{held_out}": {"color": "tab:blue", "marker": "o", "linewidth": 2},
    }
    # A curve is labelled once, however many stages have it.
    labels = dict(zip(styles, ("training reward", f"held-out {held_out}"), strict=True))
    offset, drawn = 0, list[float]()
    for stage, history in histories.items():
        for name, style in styles.items():
            steps, values = history.column(name)
            if steps:
                label = labels.pop(name, None)
                places = [offset + step for step in steps]
                axes.plot(places, values, markersize=3, label=label, **style)
                drawn += values
        last = int(history[-1]["step"]) if history else 0
        if last and len(histories) > 1:
            shade = 0.04 + 0.05 * (offset == 0)
            axes.axvspan(offset, offset + last, alpha=shade, color="gray", linewidth=0)
            axes.annotate(
                stage,
                (offset + last / 2, 1.02),
                ha="center",
                xycoords=("data", "axes fraction"),
                fontsize=9,
            )
        offset += last
    return drawn
