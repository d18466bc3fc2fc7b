"""Mix several sources into one dataset whose proportions hold in every stretch.

An epoch of N rows (the sum over all sources) takes `q_k` rows of source k, where `q_k`
is N times its weight, rounded so that they sum to N. The j-th of them has the position
(2j + 1) / 2 q_k in the epoch, and rows are sorted by position. So the first n rows hold
n q_k / N rows of source k, up to 1/2 + K q_k / 2N with K sources.

Each source cycles through its own rows across epochs, in another order each time: a
source with a large weight repeats before one with a small weight is exhausted. The
order is a function of the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_algorithms.seeds import mix, permutation
from rl_distributed.errors import ConfigError

__all__ = ["Mixture", "MixtureOrder", "quotas"]


class Mixture:
    """Several sources, for `fit(dataset=...)` and `DataModule(train=...)`.

    ```python
    Mixture({"math": "math.jsonl", "code": rows}, weights={"math": 0.7, "code": 0.3})
    ```

    Args:
        sources: Anything `load_dataset_any` takes, by name in metrics.
        weights: Relative share of each source; default: proportional to its number of
            rows.

    Raises:
        ConfigError: There is no source, or a weight is missing or not positive.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None
    ) -> None:
        if not sources:
            raise ConfigError("Mixture needs at least one source: got none")
        if weights is not None and set(weights) != set(sources):
            raise ConfigError(
                "the weights of a Mixture must name exactly its sources: got "
                f"{', '.join(sorted(weights))} for {', '.join(sorted(sources))}"
            )
        for name, weight in (weights or {}).items():
            if not 0 < weight < float("inf"):
                raise ConfigError(
                    f"the weight of {name!r} must be above 0 and finite: got {weight}"
                )
        self.sources = dict(sources)
        self.weights = dict(weights) if weights is not None else None


def quotas(weights: Sequence[float], num_rows: int) -> list[int]:
    """Apportion rows by weight, rounding the largest remainders up.

    Raises:
        ConfigError: A source would get no row.
    """
    exact = np.asarray(weights, np.float64) / np.sum(weights) * num_rows
    shares = np.floor(exact).astype(np.int64)
    rest = num_rows - int(shares.sum())
    # Stable, so that equal remainders go to the same sources on each platform.
    shares[np.argsort(shares - exact, kind="stable")[:rest]] += 1
    # A source without rows would silently be missing from the training.
    if not shares.all():
        index = int(np.argmin(shares))
        raise ConfigError(
            f"the weight {weights[index]} of source {index} of a mixture is too small: "
            f"it gets none of the {num_rows} rows of an epoch; raise it, or leave the "
            "source out"
        )
    return [int(share) for share in shares]


class MixtureOrder:
    """The order of the rows of several concatenated sources.

    Args:
        sizes: Rows of each source.
        weights: Share of each.
        seed: Seed of the order within each source.
        shuffle: Whether each source is shuffled.

    Raises:
        ConfigError: A source would get no row.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._sizes = list(sizes)
        self._quotas = quotas(weights, sum(sizes))
        self._seed, self._shuffle = seed, shuffle
        places = [(2 * np.arange(q) + 1) / (2 * q) for q in self._quotas]
        owners = np.repeat(np.arange(len(sizes)), self._quotas)
        # Stable, as rows of different sources may have equal positions.
        self._owners = owners[np.argsort(np.concatenate(places), kind="stable")]

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        return sum(self._sizes)

    def state(self) -> list[list[int]]:
        """Return the settings that determine the order besides the seed, as numbers."""
        return [list(pair) for pair in zip(self._sizes, self._quotas, strict=True)]

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the rows of an epoch as indices into the concatenated sources."""
        result = np.empty(len(self), np.int64)
        first = 0
        for source, (size, quota) in enumerate(
            zip(self._sizes, self._quotas, strict=True)
        ):
            # Counted across epochs, so that a source repeats no row before all have
            # been used.
            taken = np.arange(epoch * quota, (epoch + 1) * quota)
            result[self._owners == source] = first + self._rows(source, size, taken)
            first += size
        return result

    def _rows(
        self, source: int, size: int, taken: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows that a source contributes after `taken` earlier ones."""
        # An epoch may end in the middle of a pass, or span several.
        passes, places = taken // size, taken % size
        if not self._shuffle:
            return places
        # Each pass over a source is shuffled as an epoch; sources differ by their seed.
        seed = int(mix(self._seed, source) >> np.uint64(1))
        rows = np.empty_like(places)
        for number in np.unique(passes):
            here = passes == number
            order = permutation(size, seed=seed, epoch=int(number))
            rows[here] = order[places[here]]
        return rows
