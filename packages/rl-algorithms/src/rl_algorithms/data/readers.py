"""Read rows of JSONL, JSON, parquet and CSV files one by one."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_algorithms.data.types import Row
from rl_algorithms.errors import ColumnError, DataError

__all__ = ["ENDINGS", "read_columns", "read_file"]

# Spreadsheets and editors of Windows begin a file with a mark, which is no text.
_ENCODING = "utf-8-sig"


def read_file(path: Path) -> Iterator[Row]:
    """Read a file row by row (JSON as a whole).

    Raises:
        DataError: The ending is unknown, or a line cannot be read.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"dataset {str(path)!r} has the unknown ending {path.suffix!r}: use one of "
            f"{', '.join(ENDINGS)}"
        )
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"dataset {str(path)!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(
            f"dataset {str(path)!r} cannot be read: {error.strerror or error}"
        ) from error


def read_columns(columns: Mapping[str, Any], name: str) -> list[Row]:
    """Convert columns to rows.

    Raises:
        ColumnError: A column is not a list, or the lengths differ.
    """
    for key, values in columns.items():
        # A text is a sequence as well, and would give a row per character.
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ColumnError(
                f"dataset {name}: column {key!r} must be a list, one value per row: "
                f"got {type(values).__name__}; for a single row give [row]"
            )
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ColumnError(f"dataset {name}: columns differ in length: {lengths}")
    names = list(columns)
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def _read_jsonl(path: Path) -> Iterator[Row]:
    with open(path, encoding=_ENCODING) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"dataset {str(path)!r}, line {number}: not valid JSON: {error}"
                ) from error
            if not isinstance(value, dict):
                raise DataError(
                    f"dataset {str(path)!r}, line {number}: must be a JSON object with "
                    f"one key per column: got {type(value).__name__}"
                )
            yield value


def _read_json(path: Path) -> Iterator[Row]:
    try:
        value = json.loads(path.read_text(encoding=_ENCODING))
    except json.JSONDecodeError as error:
        raise DataError(
            f"dataset {str(path)!r} is not valid JSON: {error}; a file with one object "
            "per line must end in .jsonl"
        ) from error
    # Some exports wrap their rows in an object with metadata.
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    name = repr(str(path))
    if isinstance(value, dict):
        yield from read_columns(value, name)
        return
    if not isinstance(value, list):
        raise DataError(
            f"dataset {name} must be a JSON list of objects: got {type(value).__name__}"
        )
    for index, row in enumerate(value):
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise ColumnError(
                f"dataset {name}: row {index} must be a mapping of columns or a text: "
                f"got {type(row).__name__}"
            )
        yield row


def _read_csv(path: Path) -> Iterator[Row]:
    # The csv module handles line ends itself, as cells may contain some.
    with open(path, encoding=_ENCODING, newline="") as file:
        # Not strict, it would read an unclosed quote as one huge cell.
        reader = csv.DictReader(file, strict=True)
        try:
            names = list(reader.fieldnames or [])
            if len(set(names)) < len(names):
                # A row has one value per name, so that one of them would be lost.
                raise DataError(
                    f"dataset {str(path)!r}: two columns have one name in the header "
                    f"({', '.join(names)}); rename one of them"
                )
            for row in reader:
                # DictReader stores surplus fields under None, and None in place of
                # missing ones.
                if None in row or None in row.values():
                    raise DataError(
                        f"dataset {str(path)!r}, line {reader.line_num}: has another "
                        f"number of fields than the header ({', '.join(names)})"
                    )
                yield row
        except csv.Error as error:
            raise DataError(
                f"dataset {str(path)!r}, line {reader.line_num}: {error}"
            ) from error


def _read_parquet(path: Path) -> Iterator[Row]:
    # pyarrow is slow to import, and only parquet files need it.
    parquet = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            # Batch by batch, because a streamed file may be larger than the memory.
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset {str(path)!r} is not a readable parquet file: {error}"
        ) from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
ENDINGS = tuple(_READERS)
"""File endings that can be read."""
