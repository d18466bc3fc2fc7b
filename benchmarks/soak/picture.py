"""The picture of a soak: memory of each process by step, relative to its beginning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.soak.growth import FIRST_STEP, Growth, series


def draw(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw one panel per run.

    Args:
        path: Picture to write.
        runs: Samples by the kind of the run.
    """
    figure = Figure(figsize=(9, 4), dpi=110, layout="tight")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (kind, samples) in zip(panels, runs.items(), strict=True):
        kept = [sample for sample in samples if sample["step"] > FIRST_STEP]
        for (name, quantity), points in series(kept).items():
            growth = Growth.of(points) if quantity == "memory_bytes" else None
            if growth is None:
                continue
            steps, values = zip(*points, strict=True)
            shares = [100 * (value / growth.begin - 1) for value in values]
            axes.plot(steps, shares, label=name, linewidth=1.2)
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("memory, % more than after 300 steps")
    panels[0].legend(fontsize=7, loc="upper left")
    figure.savefig(path)
