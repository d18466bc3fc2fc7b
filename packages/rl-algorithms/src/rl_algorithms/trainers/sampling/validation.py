"""Validation on one or several held-out sets: its result, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import ValidationParts
from rl_algorithms.trainers.steps.training_rows import count_tokens
from rl_distributed.metrics.values import Mean, MetricValue, reduce_metrics
from rl_models.interfaces import LossFunction, PolicyInterface
from rl_models.types import TrainingRows

__all__ = ["ValidationResult", "validate_parts", "validation_loss"]


@dataclass(frozen=True)
class ValidationResult:
    """Metrics of the held-out data, and some answers to look at."""

    metrics: Mapping[str, Any]
    """Numbers by name, without the prefix `val:`."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Records with `prompt`, `response`, `reward` and, if the right answer is known,
    `expected`; empty if no answers were sampled. The run folder keeps them."""


def validate_parts(
    loader: Loader | ValidationParts, validate: Callable[[Loader], ValidationResult]
) -> ValidationResult:
    """Validate on a held-out set, or separately on each of several.

    Args:
        loader: Loader from `_load_data`; a `ValidationParts` holds several.
        validate: Function that measures one of them.

    Returns:
        With several sets, every metric twice: per set as `<set>/<name>` and over all
        sets as `<name>`. Typed values are merged by their type; plain numbers are
        averaged, weighted by the number of rows of each set.
    """
    if not isinstance(loader, ValidationParts):
        return validate(loader)
    found = {name: validate(part) for name, part in loader.items()}
    weighted = [
        {
            key: _weighted(value, loader.num_rows[name])
            for key, value in result.metrics.items()
        }
        for name, result in found.items()
    ]
    metrics: dict[str, Any] = dict(reduce_metrics(weighted))
    for name, result in found.items():
        metrics |= {f"{name}/{key}": value for key, value in result.metrics.items()}
    samples = [
        {"dataset": name, **sample}
        for name, result in found.items()
        for sample in result.samples
    ]
    return ValidationResult(metrics, samples)


def validation_loss(
    policy: PolicyInterface,
    batches: Iterable[TrainingRows],
    loss: LossFunction,
) -> dict[str, float]:
    """Return the mean loss over all tokens of held-out batches.

    Args:
        policy: The policy; its weights do not change.
        batches: Rows with all columns that the loss reads.
        loss: The loss of the training.

    Returns:
        `val_loss`, and `num_tokens`, over which it is the mean.
    """
    total = count = 0.0
    for rows in batches:
        num_tokens = count_tokens(rows)["num_valid_tokens"]
        output = policy.train(rows, loss, eval_mode=True, global_batch_size=rows.size)
        # Weighted by tokens, so that the mean does not depend on how rows fall into
        # batches.
        total += float(output["loss"].mean()) * num_tokens
        count += num_tokens
    return {"val_loss": total / count if count else 0.0, "num_tokens": count}


def _weighted(value: Any, num_rows: int) -> MetricValue:
    if isinstance(value, MetricValue):
        return value
    return Mean(float(value) * num_rows, float(num_rows))
