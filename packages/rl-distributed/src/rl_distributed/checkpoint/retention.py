"""Ranking of checkpoints, and the choice of those that stay."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from rl_distributed.logs.logging import get_logger

__all__ = ["RankingMetric", "metric_of", "rank", "steps_to_keep"]

_logger = get_logger(__name__)


class RankingMetric:
    """Warns once if checkpoints lack their ranking metric: its name may be wrong.

    Args:
        name: The metric; None: nothing ranks them.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._has_warned = False

    def check(self, step: int, info: Mapping[str, Any]) -> None:
        """Look for the metric in what a checkpoint is begun with.

        Args:
            step: The step.
            info: Training information; a metric that is None was not measured at this
                step, which is no mistake.
        """
        name = self._name
        if name is None or metric_of(info, name) is not None:
            return
        if name in info and info[name] is None:
            return
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _logger.log(
            level,
            "checkpoint of step %d lacks its ranking metric %r and ranks last, as will "
            "others without it; training_info has %s",
            step,
            name,
            sorted(info),
        )


def metric_of(training_info: Mapping[str, Any], name: str | None) -> float | None:
    """Return the ranking metric; None where it is missing, not a number or NaN."""
    if name is None:
        return None
    value = training_info.get(name)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # NaN is neither more nor less than any number, so it would break the sort.
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
    keep_latest_k: int | None,
    higher_is_better: bool,
    exclude_latest: bool = True,
) -> set[int]:
    """Return the steps that stay: the best ones and the newest ones.

    Args:
        metrics: The ranking metric of each step.
        keep_top_k: Number of best ones; None: none for being good.
        keep_latest_k: Number of newest ones; None: one besides the best ones. Where
            both are None, all stay.
        higher_is_better: Whether a higher metric is better.
        exclude_latest: Whether newest ones stay that are not among the best.
    """
    if keep_top_k is None and keep_latest_k is None:
        return set(metrics)
    best = rank(metrics, higher_is_better=higher_is_better)[: keep_top_k or 0]
    num_newest = 1 if keep_latest_k is None else keep_latest_k
    # Without best ones the newest are all there is.
    if not exclude_latest and keep_top_k is not None:
        num_newest = 0
    return {*best, *sorted(metrics, reverse=True)[:num_newest]}
