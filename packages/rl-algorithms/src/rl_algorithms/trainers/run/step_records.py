"""Files of JSON records that each belong to a step of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_distributed.checkpoint.storage import write_bytes_durably
from rl_distributed.metrics.sinks.jsonl import json_line, read_records

__all__ = ["drop_later_steps", "read_step_records"]


def read_step_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records that have a step, oldest first; a torn line is skipped.

    Args:
        path: The existing file.
    """
    for record in read_records(path):
        if isinstance(record.get("step"), int):
            yield record


def drop_later_steps(path: Path, step: int) -> None:
    """Remove records of later steps, which will be repeated, and a torn line.

    Args:
        path: The file; it may be missing.
        step: The last step that is kept.
    """
    if path.is_file():
        records = read_step_records(path)
        kept = [json_line(record) for record in records if record["step"] <= step]
        write_bytes_durably(path, b"".join(kept))
