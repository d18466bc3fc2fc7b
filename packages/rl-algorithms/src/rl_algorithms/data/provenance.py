"""Which rows a run was given: counts, fingerprints and licences, for its log."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from rl_algorithms.data.formats import data_formats
from rl_algorithms.data.loading import LoadedSource
from rl_algorithms.data.types import Rows

__all__ = ["SourceRecord", "fingerprint", "record_of"]

_MOST_ROWS = 1000
"""Rows that a fingerprint reads, so that it costs milliseconds whatever the size."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """What is written down about the rows of one source."""

    part: str
    """`train` or `validation`."""
    name: str
    num_rows: int
    fingerprint: str
    format: str | None
    """Name of the format that they were read by."""
    licence: str | None
    """Licence that the page of the format's data set states; None: not known."""

    def __str__(self) -> str:
        shown = {k: v for k, v in asdict(self).items() if v is not None}
        return ", ".join(f"{key} {value}" for key, value in shown.items())


def record_of(source: LoadedSource, part: str) -> SourceRecord:
    """Describe the rows of a source as they were read.

    Args:
        source: The source, with all of its rows.
        part: `train` or `validation`.
    """
    form = data_formats.get(source.format) if source.format is not None else None
    return SourceRecord(
        part,
        source.name,
        len(source.rows),
        fingerprint(source.rows),
        source.format,
        form.licence if form is not None else None,
    )


def fingerprint(rows: Rows) -> str:
    """Return 16 hexadecimal digits that differ where rows, or their order, do.

    It is SHA-256 of the number of rows and of their columns; of more than 1,000 rows
    the columns of 1,000, evenly spaced with the first one among them.
    """
    digest = hashlib.sha256(str(len(rows)).encode())
    count = min(len(rows), _MOST_ROWS)
    for place in range(count):
        row = dict(rows[place * len(rows) // count])
        text = json.dumps(row, sort_keys=True, default=repr, ensure_ascii=False)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]
