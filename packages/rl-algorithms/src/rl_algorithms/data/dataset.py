"""`ProcessedDataset`: processed rows with counts of those that were dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from rl_algorithms.data.types import DatumSpec

__all__ = ["ProcessedDataset"]


class ProcessedDataset(Sequence[DatumSpec]):
    """Rows ready for batching: a plain sequence with a few counts.

    Args:
        rows: The processed rows.
        name: Name of the dataset in messages.
        num_source_rows: Rows before over-long ones were dropped.
        num_overlong: Rows that were longer than `max_length`.
        max_length: The limit in tokens.
    """

    def __init__(
        self,
        rows: Sequence[DatumSpec],
        *,
        name: str,
        num_source_rows: int | None = None,
        num_overlong: int = 0,
        max_length: int | None = None,
    ) -> None:
        self._rows = rows
        self.name = name
        self.num_source_rows = len(rows) if num_source_rows is None else num_source_rows
        self.num_overlong = num_overlong
        self.max_length = max_length

    @overload
    def __getitem__(self, index: int) -> DatumSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DatumSpec]: ...
    def __getitem__(self, index: int | slice) -> DatumSpec | Sequence[DatumSpec]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[DatumSpec]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return (
            f"ProcessedDataset({self.name!r}, {len(self)} rows, "
            f"{self.num_overlong} over-long)"
        )
