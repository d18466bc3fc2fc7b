"""What is measured for a method: one training, one curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms import KeptWorkers, TrainResult, get_algorithm
from rl_algorithms.registry import algorithm_settings
from rl_distributed.config import merge_configs

__all__ = ["Curve", "Experiment", "curve_of", "train", "with_model"]


@dataclass(frozen=True)
class Curve:
    """One run: a number over the steps, and levels to compare it with."""

    steps: list[int]
    values: list[float]
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines by label, for example what the teacher reaches."""
    rejected: list[float] | None = None
    """Share of correct answers that a second check rejects, aligned with the values;
    None: there is no such check."""


@dataclass(frozen=True)
class Experiment:
    """A method on its small task."""

    title: str
    label: str
    """The quantity on the curve."""
    run: Callable[[Path, int, KeptWorkers], Curve]
    """Trains in an empty folder with a seed, on the processes of a pool."""
    algorithm: str | None = None
    """The algorithm, if the experiment is not named after it or a preset."""


def train(
    algorithm: str,
    settings: Mapping[str, Any],
    folder: Path,
    seed: int,
    pool: KeptWorkers,
    environment: Any = None,
) -> TrainResult:
    """Train once by an algorithm or preset; the data sets come from the settings."""
    cls = get_algorithm(algorithm)
    own = {"output_dir": str(folder), "seed": seed}
    tree = algorithm_settings(algorithm, merge_configs(settings, own))
    trainer = cls(cls.config_class.from_dict(tree, source=algorithm), pool=pool)
    return trainer.fit(environment=environment)


def curve_of(result: TrainResult, metric: str, **levels: float) -> Curve:
    """Return a metric of a run's history."""
    steps, values = result.history.column(metric)
    return Curve(steps, values, levels)


def with_model(settings: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """Return settings for training this model."""
    return dict(merge_configs(settings, {"policy": {"model_name": str(model)}}))
