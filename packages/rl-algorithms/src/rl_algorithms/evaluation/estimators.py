"""Estimate pass@k, cons@k and means from n samples per prompt.

Each estimator is the exact expectation over all subsets of k of the n answers, computed
without enumerating the subsets.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rl_distributed.errors import ConfigError

__all__ = ["Interval", "cons_at_k", "mean_with_interval", "pass_at_k"]

_Z = 1.959963984540054
"""Half-width of the central 95 % interval of the standard normal distribution."""
_MOST_BITS = 1000
"""Size of a number of subsets that a float can hold; its largest has 1024 bits."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""Return the probability that at least one of k samples is correct.

    It is unbiased for the probability of k fresh samples (Chen et al.,
    arXiv:2107.03374):

    $$
    1 - \frac{\binom{n - c}{k}}{\binom{n}{k}}
    $$

    Args:
        num_samples: n, the number of samples.
        num_correct: c, the number of correct samples.
        k: The size of the subsets.

    Raises:
        ConfigError: k is not from 1 to n, or c not from 0 to n.
    """
    _check(num_samples, k)
    if not 0 <= num_correct <= num_samples:
        raise ConfigError(
            f"num_correct must be from 0 to {num_samples}: got {num_correct}"
        )
    wrong = num_samples - num_correct
    # Exact integers up to the division, where products of fractions would round.
    return 1 - math.comb(wrong, k) / math.comb(num_samples, k)


def cons_at_k(
    answers: Sequence[str | None], correct: Sequence[bool | float], k: int
) -> float:
    """Return the probability that the majority answer of k samples is correct.

    The most frequent answer of the k samples wins (self-consistency,
    arXiv:2203.11171). Ties are broken uniformly at random, so tied answers count in
    equal parts. A sample without an answer (None) does not vote; without any vote the
    majority is wrong. If equal answers were judged differently, their mean counts.

    Args:
        answers: The answer of each of the n samples.
        correct: 1 for correct samples.
        k: The size of the subsets.

    Raises:
        ConfigError: k is not from 1 to n.
    """
    _check(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - sum(votes.values())
    worth: dict[str, float] = defaultdict(float)
    for answer, value in zip(answers, correct, strict=True):
        if answer is not None:
            worth[answer] += float(value) / votes[answer]
    choices = _choices(len(answers), k)
    total = 0.0
    for most in range(1, min(k, max(votes.values(), default=0)) + 1):
        total += _ways_to_win(votes, worth, choices(silent), most, k, choices)
    return total / float(choices(len(answers))[k])


_Choices = Callable[[int], NDArray[np.float64]]


def _choices(num_samples: int, k: int) -> _Choices:
    """Return a function of the ways to take 0 to k of a number of equal samples.

    Where subsets are too many for a float, ways are weighted as if each sample were
    taken with the probability k / n: a factor that all subsets of k share.
    """
    is_huge = math.comb(num_samples, min(k, num_samples // 2)).bit_length() > _MOST_BITS

    def ways(count: int, taken: int) -> float:
        number = math.comb(count, taken)
        if not is_huge:
            return float(number)
        weight = k**taken * (num_samples - k) ** (count - taken)
        # Integers up to the division, whose parts no float could hold.
        return float(number * weight / num_samples**count)

    @cache
    def of(count: int) -> NDArray[np.float64]:
        return np.array([ways(count, taken) for taken in range(min(count, k) + 1)])

    return of


def _ways_to_win(
    votes: Counter[str],
    worth: dict[str, float],
    silent: NDArray[np.float64],
    most: int,
    k: int,
    choices: _Choices,
) -> float:
    """Sum the value of the winner over all subsets in which it has `most` votes.

    This is a dynamic program over the distinct answers. `ways[tied, size]` counts the
    choices among the answers seen so far that take `size` samples, with `tied` answers
    at `most` votes and the others below; `gain[tied, size]` sums the values of the tied
    answers over the same choices.
    """
    most_tied = min(k // most, len(votes))
    ways = np.zeros((most_tied + 1, k + 1))
    # Silent samples fill places of the subset but never win.
    ways[0, : len(silent)] = silent
    gain = np.zeros_like(ways)
    for answer, count in votes.items():
        taking = choices(count)
        next_ways, next_gain = np.zeros_like(ways), np.zeros_like(gain)
        for taken, number in enumerate(taking[:most]):
            end = k + 1 - taken
            next_ways[:, taken:] += number * ways[:, :end]
            next_gain[:, taken:] += number * gain[:, :end]
        if count >= most:
            end, number = k + 1 - most, taking[most]
            before = ways[:-1, :end]
            next_ways[1:, most:] += number * before
            next_gain[1:, most:] += number * (gain[:-1, :end] + worth[answer] * before)
        ways, gain = next_ways, next_gain
    return float((gain[1:, k] / np.arange(1, most_tied + 1)).sum())


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its uncertainty."""

    mean: float
    low: float
    """Lower end of the 95 % interval; the mean itself with a single value."""
    high: float
    """Its upper end."""


def mean_with_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its 95 % confidence interval.

    The interval is `mean +- 1.96 s / sqrt(number)`, s being the standard deviation.
    Samples of one prompt are not independent: pass one value per prompt, their mean.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    count = len(values)
    # fsum, so that the mean does not depend on the order of the prompts.
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = _Z * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ConfigError(
            f"k must be from 1 to the number of samples ({num_samples}): got {k}; "
            "lower ks or raise num_generations"
        )
