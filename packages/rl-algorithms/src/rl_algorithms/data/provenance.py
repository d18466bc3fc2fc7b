"""Provenance of a run's rows for its log: counts, fingerprints and licences."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from rl_algorithms.data.formats import data_formats
from rl_algorithms.data.loading import LoadedSource
from rl_algorithms.data.types import Rows

__all__ = ["SourceRecord", "fingerprint", "joint_fingerprint", "record_of"]

_MOST_ROWS = 1000
"""Number of rows that a fingerprint reads, so that it takes milliseconds for any size.
"""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Log record of the rows of one source."""

    part: str
    """`train` or `validation`."""
    name: str
    num_rows: int
    fingerprint: str
    format: str | None
    """Name of the format of the rows."""
    licence: str | None
    """Licence stated on the page of the format's dataset; None: unknown."""

    def __str__(self) -> str:
        shown = {k: v for k, v in asdict(self).items() if v is not None}
        return ", ".join(f"{key} {value}" for key, value in shown.items())


def record_of(source: LoadedSource, part: str) -> SourceRecord:
    """Return the provenance of the rows of a source.

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


def joint_fingerprint(records: Sequence[SourceRecord]) -> str:
    """Return one fingerprint of the training rows of all sources, in their order."""
    found = [record.fingerprint for record in records if record.part == "train"]
    if len(found) == 1:
        return found[0]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def fingerprint(rows: Rows) -> str:
    """Return a fingerprint of rows and their order, as 16 hexadecimal digits.

    It is the SHA-256 of the number of rows and their columns; of more than 1,000 rows,
    only 1,000 evenly spaced ones, including the first, are read.
    """
    # The number of rows too, since only some of many rows are read.
    digest = hashlib.sha256(str(len(rows)).encode())
    count = min(len(rows), _MOST_ROWS)
    for place in range(count):
        row = dict(rows[place * len(rows) // count])
        try:
            text = _text_of(row)
        except TypeError:
            # JSON has no keys but texts and numbers, and cannot sort both together.
            text = _text_of(_with_text_keys(row))
        # Scraped text may contain lone surrogates, which plain UTF-8 refuses.
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _text_of(row: Any) -> str:
    # Sorted, as readers may order columns differently.
    return json.dumps(row, sort_keys=True, default=_described, ensure_ascii=False)


def _described(value: Any) -> Any:
    """Return what stands for a value that JSON lacks, the same in each process."""
    if isinstance(value, Set):
        # The order of a set depends on the process.
        return sorted(map(_without_address, value))
    return _without_address(value)


def _without_address(value: Any) -> str:
    # repr covers dates and arrays; of other objects it may have the place in memory.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else repr(key): _with_text_keys(part)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_text_keys(part) for part in value]
    return value
