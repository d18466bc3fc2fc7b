"""Load the sources of a run, and split off validation rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rl_algorithms.data.config import DatasetConfig
from rl_algorithms.data.mixture import Mixture
from rl_algorithms.data.sources import (
    describe_source,
    load_configured,
    load_dataset_any,
)
from rl_algorithms.data.types import Rows
from rl_algorithms.errors import EmptyDatasetError
from rl_algorithms.seeds import permutation

__all__ = ["LoadedSource", "load_sources", "set_aside"]

_SPLIT_EPOCH = -1
"""Epoch number of the permutation that selects validation rows; no training epoch has
it."""


@dataclass(frozen=True)
class LoadedSource:
    """Rows of one source."""

    title: str
    """Name in metrics; empty if there is only one source."""
    name: str
    """Name in messages."""
    rows: Rows
    """Rows of the source."""
    weight: float | None = None
    """Share in a mixture; None: proportional to the number of rows."""
    format: str | None = None
    """Name of the format of the rows."""

    def first(self, count: int) -> LoadedSource:
        """Return the source with only its first rows."""
        if len(self.rows) <= count:
            return self
        return replace(self, rows=take(self.rows, range(count)))


def load_sources(source: Any, config: DatasetConfig | None) -> list[LoadedSource]:
    """Load the given source, else the configured one; return [] if there is neither.

    Raises:
        DataError: A source cannot be read.
    """
    if isinstance(source, Mixture):
        # None for each source: no weight, hence in proportion to the number of rows.
        weights = source.weights or dict.fromkeys(source.sources)
        return [
            LoadedSource(title, repr(title), load_dataset_any(part), weights[title])
            for title, part in source.sources.items()
        ]
    if source is not None:
        rows = load_dataset_any(source)
        return [LoadedSource("", describe_source(source), rows)]
    if config is None:
        return []
    if config.mixture is None:
        rows, name = load_configured(config)
        return [LoadedSource("", name, rows, format=config.format)]
    found = []
    for part in config.mixture:
        rows, name = load_configured(part)
        found.append(LoadedSource(part.title, name, rows, part.weight, part.format))
    return found


def set_aside(
    sources: list[LoadedSource], size: float, seed: int
) -> tuple[list[LoadedSource], list[LoadedSource]]:
    """Split off validation rows: `size` rows in all, or that fraction of each source.

    Raises:
        EmptyDatasetError: One side would have no rows.
    """
    total = sum(len(source.rows) for source in sources)
    part = size / total if size >= 1 else size
    trained, held_out = [], []
    for source in sources:
        rows = source.rows
        # With one source the number is exact, where rounding a fraction could miss it.
        whole = size >= 1 and len(sources) == 1
        count = int(size) if whole else round(part * len(rows))
        if not 0 < count < len(rows):
            raise EmptyDatasetError(
                f"data.split_validation_size={size} sets {count} of the {len(rows)} "
                f"rows of dataset {source.name} aside: at least one row must be left "
                "on either side"
            )
        # Chosen at random, as many data sets are sorted by topic or difficulty.
        order = permutation(len(rows), seed=seed, epoch=_SPLIT_EPOCH)
        # Sorted, so that both parts keep the order of the source.
        trained.append(replace(source, rows=take(rows, sorted(order[count:]))))
        held_out.append(
            replace(
                source,
                rows=take(rows, sorted(order[:count])),
                name=f"{source.name} (validation part)",
            )
        )
    return trained, held_out


def take(rows: Rows, indices: Iterable[Any]) -> Rows:
    """Return the rows at these indices, in that order."""
    return [rows[int(index)] for index in indices]
