"""Validation by sampling answers to held-out prompts and scoring them."""

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

# Validations use the seeds of this step number, which no training step has. They are
# the same each time, so that two validations differ only by the policy.
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
        engine: Rollout engine.
        loader: Batches of prompts.
        num_generations: Answers per prompt.
        seed: The run's seed.
        greedy: Whether to always take the most likely token.
        sampling: Sampling parameters otherwise.
        accuracy_threshold: Minimum reward of a right answer; None for the environment's
            own accuracy.

    Returns:
        The metrics of the rollouts, with `accuracy` if it is known, and a few answers.
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
    """Return an answer in readable form, with the right answer if it is known."""
    shown: dict[str, Any] = {
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
        "ending": sample.ending.value,
    }
    # Prompt rows have the right answer under this name, whatever its column.
    expected = sample.extra_env_info.get("answer")
    if isinstance(expected, str | int | float):
        shown["expected"] = expected
    return shown


def _with_accuracy(
    result: RolloutResult, threshold: float | None
) -> dict[str, MetricValue]:
    """Return the metrics of a rollout, including the share of right answers."""
    metrics = dict(result.metrics)
    if threshold is not None:
        scored = result.rows["outcome"] <= int(Outcome.TRUNCATED)
        # Failed rows have a reward of 0.0, which a low threshold would count as right.
        right = (result.rows["rewards"] >= threshold) & scored
        metrics["accuracy"] = Mean(float(right.sum()), float(scored.sum()))
    elif "env/accuracy" in metrics:
        metrics["accuracy"] = metrics["env/accuracy"]
    return metrics
