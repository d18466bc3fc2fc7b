"""Validation by sampling: answers to held-out prompts, scored by the environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_algorithms.rollout import (
    Outcome,
    RolloutEngine,
    RolloutResult,
    RolloutSample,
)
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_distributed.metrics import reduce_metrics
from rl_distributed.metrics.values import Mean, MetricValue

__all__ = ["validate_by_answers"]

# Validation samples with the noise of this step number, which no training step has: the
# same noise each time, so that two validations differ by the policy only.
_VALIDATION_STEP = -1
_NUM_SAMPLES = 8


def validate_by_answers(
    engine: RolloutEngine,
    loader: Iterable[Any],
    *,
    num_generations: int,
    seed: int,
    greedy: bool,
    sampling: Any,
    accuracy_threshold: float | None = None,
) -> ValidationResult:
    """Sample answers to all prompts of a loader.

    Args:
        engine: Plays them.
        loader: Batches of prompts.
        num_generations: Answers per prompt.
        seed: The run's seed.
        greedy: Take the most likely token each time.
        sampling: How to sample otherwise.
        accuracy_threshold: Reward from which on an answer is right; None: only what the
            environment calls accuracy is.

    Returns:
        The metrics of the rollouts, with `accuracy` where that is known, and a few
        answers.
    """
    metrics: list[dict[str, MetricValue]] = []
    samples: list[dict[str, Any]] = []
    first = 0
    for batch in loader:
        result = engine.run(
            batch,
            num_generations=num_generations,
            seed=seed,
            step=_VALIDATION_STEP,
            first_prompt_index=first,
            greedy=greedy,
            sampling=None if greedy else sampling,
        )
        first += batch.size
        metrics.append(_with_accuracy(result, accuracy_threshold))
        missing = min(_NUM_SAMPLES - len(samples), result.rows.size)
        for row in range(missing):
            samples.append(_shown(result.sample(row)))
    return ValidationResult(reduce_metrics(metrics), samples)


def _shown(sample: RolloutSample) -> dict[str, Any]:
    """Return what a person reads of an answer, the right one too where it is known."""
    shown: dict[str, Any] = {
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
    }
    # Whatever its column is called, rows of prompts have it under this name.
    expected = sample.extra_env_info.get("answer")
    if isinstance(expected, str | int | float):
        shown["expected"] = expected
    return shown


def _with_accuracy(
    result: RolloutResult, threshold: float | None
) -> dict[str, MetricValue]:
    """Return the metrics of a rollout, and how many of its answers were right."""
    metrics = dict(result.metrics)
    if threshold is not None:
        scored = result.rows["outcome"] <= int(Outcome.TRUNCATED)
        right = (result.rows["rewards"] >= threshold) & scored
        metrics["accuracy"] = Mean(float(right.sum()), float(scored.sum()))
    elif "env/accuracy" in metrics:
        metrics["accuracy"] = metrics["env/accuracy"]
    return metrics
