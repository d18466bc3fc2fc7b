"""The picture of a soak: memory of each process by step, above its beginning."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.soak.growth import FIRST_STEP, Growth, series
from benchmarks.soak.recipe import PAGE_SERVER

SMOOTHED = 21
"""Number of samples of which a point is the median."""


def draw(
    path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], num_steps: int
) -> None:
    """Draw one panel per run, without the server of its page.

    Args:
        path: Picture to write.
        runs: Samples by the kind of the run.
        num_steps: Number of steps of each, whose end is left out.
    """
    figure = Figure(figsize=(9, 4), dpi=110, layout="tight")
    names = {
        name for samples in runs.values() for s in samples for name in s["processes"]
    }
    colours = {name: f"C{number}" for number, name in enumerate(sorted(names))}
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (kind, samples) in zip(panels, runs.items(), strict=True):
        kept = [s for s in samples if FIRST_STEP < s["step"] < num_steps]
        for (name, quantity), points in series(kept).items():
            growth = Growth.of(points)
            if quantity != "memory_bytes" or name == PAGE_SERVER or growth is None:
                continue
            steps, values = zip(*points, strict=True)
            above = [(value - growth.begin) / (1 << 20) for value in _smooth(values)]
            axes.plot(steps, above, colours[name], label=name, linewidth=1.2)
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("memory above the first samples, MiB")
    panels[0].legend(fontsize=7, loc="upper left")
    figure.savefig(path)


def _smooth(values: Sequence[float]) -> list[float]:
    half = SMOOTHED // 2
    return [
        statistics.median(values[max(place - half, 0) : place + half + 1])
        for place in range(len(values))
    ]
