"""Draw held-out accuracy of several runs of the quickstart into one picture.

    python -m benchmarks.curves OUT.png LABEL=RUN_FOLDER[,RUN_FOLDER...] ...

Each curve shows the last stage of its run, over training steps. Runs with the same
label share a colour.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from rl_algorithms.trainers.run.history import History


def curve(run: Path) -> tuple[list[int], list[float]]:
    """Return steps and held-out accuracy of the last stage of a run."""
    stages = list(json.loads((run / "run.json").read_text())["config"]["stages"])
    result = json.loads((run / "stages" / f"{stages[-1]}.json").read_text())
    path = Path(result["run_dir"]) / "metrics.jsonl"
    return History.read(path, up_to=result["steps"]).column("val:accuracy")


def main(target: str, *runs: str) -> None:
    """Draw the curves."""
    figure = Figure(figsize=(8, 4), dpi=130, layout="tight")
    axes = figure.subplots()
    for number, text in enumerate(runs):
        label, _, folders = text.partition("=")
        several = folders.split(",")
        style = "--" if "control" in label else "-"
        for index, folder in enumerate(several):
            steps, values = curve(Path(folder))
            axes.plot(
                steps,
                values,
                style,
                label=None if index else label,
                color=f"C{number}",
                linewidth=2 if len(several) == 1 else 0.8,
            )
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
