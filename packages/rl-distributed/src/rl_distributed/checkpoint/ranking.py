"""Which checkpoints are the best, and which stay: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["metric_of", "rank", "steps_to_keep"]


def metric_of(training_info: Mapping[str, Any], name: str | None) -> float | None:
    """Return the ranking metric; None where it is missing, not a number or NaN."""
    if name is None:
        return None
    value = training_info.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return None if math.isnan(value) else float(value)


def rank(metrics: Mapping[int, float | None], *, higher_is_better: bool) -> list[int]:
    """Order steps, best first.

    Steps without the metric come last; ties, and those, put the newer step first.
    """
    sign = 1.0 if higher_is_better else -1.0

    def key(step: int) -> tuple[bool, float, int]:
        value = metrics[step]
        return (value is not None, 0.0 if value is None else sign * value, step)

    return sorted(metrics, key=key, reverse=True)


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_top_k: int | None,
    keep_latest_k: int,
    higher_is_better: bool,
) -> set[int]:
    """Return the steps that stay: the best ones and the newest ones."""
    if keep_top_k is None:
        return set(metrics)
    best = rank(metrics, higher_is_better=higher_is_better)[:keep_top_k]
    newest = sorted(metrics, reverse=True)[:keep_latest_k] if keep_latest_k else []
    return {*best, *newest}
