"""Monitoring of the mismatch between sampler and trainer in every training step.

Both compute log-probs of the same tokens, with different code and possibly different
precision. A difference gives every token a wrong importance weight, and weights that
did not arrive show here in the first step. The loss reports the log-ratios of its
tokens before it clips anything; here they become quantiles, which are checked against a
limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_algorithms.errors import MismatchError
from rl_algorithms.losses.mismatch import LOG_RATIO
from rl_algorithms.trainers.settings.mismatch_config import MismatchConfig
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.distribution import Distribution

__all__ = ["MismatchMonitor", "mismatch_metrics"]

_logger = get_logger(__name__)

_QUANTILES = (50, 90, 99)


class MismatchMonitor:
    """Turns the log-ratios of the loss into metrics, and checks the limit."""

    def __init__(self, config: MismatchConfig) -> None:
        self._config = config
        self._num_above = 0

    def report(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a step, with quantiles in place of the log-ratios.

        Raises:
            MismatchError: The step exceeds the limit, and `action` is `stop`.
        """
        found = mismatch_metrics(metrics)
        self._watch(found)
        kept = {name: v for name, v in metrics.items() if not _is_log_ratio(name)}
        return kept | found

    def _watch(self, found: Mapping[str, float]) -> None:
        limit, statistic = self._config.limit, self._config.statistic
        value = found.get(f"mismatch/logprob_diff/{statistic}")
        num_bad = found.get("mismatch/num_nonfinite", 0.0)
        if limit is None or ((value is None or value <= limit) and not num_bad):
            return
        self._num_above += 1
        what = (
            f"{num_bad:.0f} tokens have a log-prob that is not finite"
            if num_bad
            else f"the {statistic} of the difference between the log-probs of trainer "
            f"and sampler is {value:.3g} (mismatch.limit is {limit:g})"
        )
        if self._config.action == "stop":
            raise MismatchError(
                f"{what}. Look at the precision of both sides and at "
                "policy.generation.weight_sync.probe, or raise the limit."
            )
        if self._num_above & (self._num_above - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            _logger.warning("%s, in %d steps so far", what, self._num_above)


def mismatch_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return quantiles of the mismatch, over all tokens and by position in the row.

    Args:
        metrics: Metrics of the loss, merged over a step; names that begin with
            `mismatch/log_ratio/` hold distributions of `log p_trainer - log p_sampler`.

    Returns:
        `mismatch/logprob_diff/*` for its absolute value and `mismatch/ratio/*` for
        `p_trainer / p_sampler`, not clipped; both also by bucket of positions.
    """
    buckets = {
        name.removeprefix(f"{LOG_RATIO}/"): value
        for name, value in metrics.items()
        if _is_log_ratio(name) and isinstance(value, Distribution)
    }
    found: dict[str, float] = {}
    whole = Distribution()
    for label, value in buckets.items():
        found |= _numbers(value, f"/{label}")
        whole = whole.merge(value)
    if whole.num_nonfinite:
        found["mismatch/num_nonfinite"] = float(whole.num_nonfinite)
    return _numbers(whole, "") | found


def _is_log_ratio(name: str) -> bool:
    return name.startswith(f"{LOG_RATIO}/")


def _numbers(log_ratio: Distribution, below: str) -> dict[str, float]:
    """Return quantiles of |x|, and of e^x by those of x, as it is monotonic."""
    if not log_ratio.count:
        return {}
    size = _absolute(log_ratio)
    numbers = {
        f"mismatch/logprob_diff{below}/mean": float(size),
        f"mismatch/logprob_diff{below}/max": size.largest,
        f"mismatch/ratio{below}/mean": _mean_exp(log_ratio),
        f"mismatch/ratio{below}/min": _exp(log_ratio.smallest),
        f"mismatch/ratio{below}/max": _exp(log_ratio.largest),
    }
    for percent in _QUANTILES:
        name = f"p{percent}"
        numbers[f"mismatch/logprob_diff{below}/{name}"] = size.percentile(percent)
        ratio = _exp(log_ratio.percentile(percent))
        numbers[f"mismatch/ratio{below}/{name}"] = ratio
    return numbers


def _absolute(values: Distribution) -> Distribution:
    above = Distribution(
        buckets=values.buckets, num_zeros=values.num_zeros, smallest=0.0
    )
    below = Distribution(buckets=values.negative_buckets)
    sizes = above.merge(below)
    largest = max(values.largest, -values.smallest)
    total = sum(middle * number for middle, number in sizes.points())
    return Distribution(
        sizes.buckets,
        num_zeros=sizes.num_zeros,
        total=total,
        smallest=0.0,
        largest=largest,
    )


def _mean_exp(values: Distribution) -> float:
    total = sum(_exp(middle) * number for middle, number in values.points())
    return total / values.count


def _exp(value: float) -> float:
    # e^709 is the largest that a float holds; beyond that, exp raises.
    return math.exp(min(value, 700.0))
