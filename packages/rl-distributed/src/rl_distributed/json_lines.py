"""Read files of JSON lines, whose last line may be torn: its writer was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["parse_records", "read_records", "step_of"]


def parse_records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Parse lines in order, skipping those that are torn or hold no JSON object."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the records of a file, oldest first.

    A torn line, left by a writer that was killed or is writing it, is skipped.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from parse_records(file)


def step_of(line: bytes) -> int:
    """Return the step of a line; 0 for one that has none, or that is torn."""
    step = next(parse_records([line]), {}).get("step", 0)
    return step if isinstance(step, int) else 0
