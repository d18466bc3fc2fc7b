"""Results of an evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.evaluation.estimators import (
    Interval,
    cons_at_k,
    mean_with_interval,
    pass_at_k,
)

__all__ = ["DatasetEvaluation", "EvaluationResult"]


@dataclass(frozen=True)
class DatasetEvaluation:
    """Results of one dataset."""

    name: str
    """Name of the dataset."""
    num_prompts: int
    """Number of prompts."""
    num_generations: int
    """Number of answers per prompt."""
    metrics: dict[str, float]
    """Numbers by name, as `pass@1`, `cons@8`, `reward`, `reward_low`."""
    samples: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """All answers: `dataset`, `idx`, `prompt`, `response`, `answer`, `reward` (None if
    not scored), `correct`, `truncated`, `num_tokens`, and the whole conversation as
    `messages`."""

    @classmethod
    def of(
        cls,
        name: str,
        samples: list[dict[str, Any]],
        num_generations: int,
        ks: Sequence[int],
        environment: Mapping[str, float] | None = None,
    ) -> DatasetEvaluation:
        """Compute the metrics.

        An unscored answer counts as wrong, and is excluded from the mean reward.

        Args:
            name: Name of the dataset.
            samples: The answers, grouped by prompt.
            num_generations: Number of answers per prompt.
            ks: Values of k for pass@k and cons@k.
            environment: The environment's own metrics.
        """
        groups = [
            samples[first : first + num_generations]
            for first in range(0, len(samples), num_generations)
        ]
        scored = [
            [s["reward"] for s in group if s["reward"] is not None] for group in groups
        ]
        # One value per prompt, because the answers to a prompt are not independent.
        rewards = mean_with_interval([sum(r) / len(r) for r in scored if r])
        count = max(len(samples), 1)
        # The environment's metrics first, so that none of them replaces one of these.
        metrics = dict(environment or {}) | {
            **_named("reward", rewards),
            "unscored_rate": sum(s["reward"] is None for s in samples) / count,
            "truncation_rate": sum(s["truncated"] for s in samples) / count,
            "mean_response_tokens": sum(s["num_tokens"] for s in samples) / count,
        }
        for k in ks:
            passed = [
                pass_at_k(num_generations, sum(s["correct"] for s in group), k)
                for group in groups
            ]
            metrics |= _named(f"pass@{k}", mean_with_interval(passed))
        for k in ks:
            agreed = [
                cons_at_k(
                    [s["answer"] for s in group], [s["correct"] for s in group], k
                )
                for group in groups
            ]
            metrics |= _named(f"cons@{k}", mean_with_interval(agreed))
        return cls(name, len(groups), num_generations, metrics, samples)


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {
        name: interval.mean,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
    }


@dataclass(frozen=True)
class EvaluationResult:
    """Results of all datasets."""

    model: str
    """The evaluated model."""
    datasets: dict[str, DatasetEvaluation]
    """Results by dataset."""
    config: dict[str, Any] = field(repr=False)
    """The whole configuration, to repeat the evaluation."""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name, as `<dataset>/<name>` if there are several datasets."""
        if len(self.datasets) == 1:
            return dict(next(iter(self.datasets.values())).metrics)
        return {
            f"{name}/{key}": value
            for name, found in self.datasets.items()
            for key, value in found.metrics.items()
        }

    @property
    def samples(self) -> list[dict[str, Any]]:
        """All answers."""
        return [s for found in self.datasets.values() for s in found.samples]

    def to_dict(self, *, samples: bool = True) -> dict[str, Any]:
        """Return everything as JSON values.

        Args:
            samples: Whether to include the answers.
        """
        datasets = {
            name: {
                "num_prompts": found.num_prompts,
                "num_generations": found.num_generations,
                "metrics": _finite(found.metrics),
            }
            for name, found in self.datasets.items()
        }
        data: dict[str, Any] = {
            "model": self.model,
            "datasets": datasets,
            "config": self.config,
        }
        return {**data, "samples": self.samples} if samples else data

    def save(self, path: str | Path, *, samples: bool = True) -> Path:
        """Write a JSON file atomically; create its folder if necessary."""
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        text = json.dumps(self.to_dict(samples=samples), indent=1, ensure_ascii=False)
        # Observations may hold lone surrogates, which UTF-8 refuses. Escaped so, they
        # are what JSON has for them.
        temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        # A reader sees the old or the new file, never half of one.
        os.replace(temporary, target)
        return target


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinities, which JSON lacks, by null."""
    return {
        name: value if math.isfinite(value) else None for name, value in metrics.items()
    }
