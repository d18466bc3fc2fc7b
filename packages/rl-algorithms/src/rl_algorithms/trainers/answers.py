"""Validation by sampling: answers to held-out prompts, scored by the environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_algorithms.rollout import RolloutEngine
from rl_algorithms.trainers.validation import ValidationResult
from rl_distributed.metrics import reduce_metrics

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
) -> ValidationResult:
    """Sample answers to all prompts of a loader.

    Returns:
        `accuracy` (what the environment calls so, else the mean reward), the other
        metrics of the rollouts, and a few answers.
    """
    metrics = []
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
        metrics.append(result.metrics)
        missing = min(_NUM_SAMPLES - len(samples), result.rows.size)
        for row in range(missing):
            sample = result.sample(row)
            samples.append(
                {
                    "prompt": sample.prompt,
                    "response": sample.response,
                    "reward": sample.reward,
                }
            )
    reduced: dict[str, Any] = dict(reduce_metrics(metrics))
    reduced["accuracy"] = reduced.get("env/accuracy", reduced["reward"])
    return ValidationResult(reduced, samples)
