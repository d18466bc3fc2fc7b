"""Measured curves in a file, and their plot."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.learning.methods import EXPERIMENTS
from rl_algorithms import KeptWorkers
from rl_algorithms.presets import find_preset

__all__ = ["draw", "measure"]


def measure(name: str, seeds: list[int], path: Path) -> None:
    """Train by one method once per seed, and save each run when it has ended."""
    experiment = EXPERIMENTS[name]
    preset = find_preset(name)
    record: dict[str, Any] = {
        "name": name,
        "title": experiment.title,
        "label": experiment.label,
        "algorithm": experiment.algorithm or (preset.algorithm if preset else name),
        "seeds": json.loads(path.read_text())["seeds"] if path.exists() else {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with KeptWorkers() as pool, tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            began_s = time.monotonic()
            curve = experiment.run(Path(folder) / str(seed), seed, pool)
            record["seeds"][str(seed)] = {
                "steps": curve.steps,
                "values": curve.values,
                "levels": dict(curve.levels),
                **({} if curve.rejected is None else {"rejected": curve.rejected}),
                "wall_s": round(time.monotonic() - began_s, 1),
            }
            print(name, seed, json.dumps(record["seeds"][str(seed)]), flush=True)
            record["seeds"] = dict(sorted(record["seeds"].items()))
            path.write_text(json.dumps(record, indent=1) + "\n")


def draw(record: Mapping[str, Any], target: Path) -> None:
    """Draw a line per seed, their mean, and the levels."""
    figure = Figure(figsize=(7, 3.6), dpi=120, layout="tight")
    axes = figure.subplots()
    runs = list(record["seeds"].values())
    label: str | None = f"seeds {', '.join(record['seeds'])}"
    for run in runs:
        axes.plot(
            run["steps"], run["values"], "C0", alpha=0.45, linewidth=1.2, label=label
        )
        label = None
    if len({tuple(run["steps"]) for run in runs}) == 1 and len(runs) > 1:
        columns = zip(*(run["values"] for run in runs), strict=True)
        mean = [sum(column) / len(runs) for column in columns]
        axes.plot(runs[0]["steps"], mean, color="C0", linewidth=2.5, label="mean")
    for number, label in enumerate(runs[0]["levels"]):
        level = sum(run["levels"][label] for run in runs) / len(runs)
        axes.axhline(level, color=f"C{number + 1}", linestyle="--", label=label)
    axes.set_title(record["title"])
    axes.set_xlabel("training step")
    axes.set_ylabel(record["label"])
    if all(0 <= value <= 1 for run in runs for value in run["values"]):
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target)
