"""The time line of a stage for the page: its steps, and a chunk for each of them.

`timeline.jsonl` has more steps than a page needs, so the first and the newest ones are
shown. Records never change once they are written, so a chunk is named by the begin of
its record and can be kept by a page while the run goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_distributed.timing.timeline_file import TIMELINE, read_timeline

__all__ = ["StageTimeline", "read_stage_timeline"]

NUM_FIRST, NUM_NEWEST = 10, 30
"""Number of the first and of the newest records that a page shows."""


@dataclass(frozen=True)
class StageTimeline:
    """The shown part of a time line."""

    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Records by the number of their chunk, in order."""
    num_stored: int = 0
    """Number of records in the file."""

    def where(self, key: str) -> dict[str, Any] | None:
        """Return what the page needs to ask for chunks; None: there is no time line.

        Args:
            key: Prefix of the names of the chunks.
        """
        if not self.records:
            return None
        return {
            "key": key,
            "stored": self.num_stored,
            "steps": [
                [record["step"], record["is_start"], number, record["seconds"]]
                for number, record in self.records.items()
            ],
        }


def read_stage_timeline(folder: Path) -> StageTimeline:
    """Read the time line of a stage.

    Args:
        folder: Folder of the stage; it may have none.
    """
    found, num_stored = read_timeline(
        folder / TIMELINE, num_first=NUM_FIRST, num_newest=NUM_NEWEST
    )
    records = {}
    for record in found:
        try:
            plain = _plain(record)
        except (KeyError, TypeError, ValueError, AttributeError):
            # Damaged, or written by another version.
            continue
        records[round(plain["start_s"] * 1000)] = plain
    return StageTimeline(records, num_stored)


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with nothing but what the page reads."""
    methods = [str(method) for method in record["methods"]]
    return {
        "step": int(record["step"]),
        "is_start": bool(record["is_start"]),
        "start_s": _finite(record["start_s"]),
        "seconds": _finite(record["seconds"]),
        "methods": methods,
        "rows": [_row(row, len(methods)) for row in record["rows"]],
    }


def _row(row: dict[str, Any], num_methods: int) -> dict[str, Any]:
    gpu = row["gpu_memory_bytes"]
    calls = [[int(value) for value in call] for call in row["calls"]]
    if any(len(call) != 3 or not 0 <= call[0] < num_methods for call in calls):
        raise ValueError("no calls")
    return {
        "name": str(row["name"]),
        "node": str(row["node"]),
        "pid": int(row["pid"]),
        "calls": calls,
        "summed": {
            str(method): [int(number), _finite(seconds)]
            for method, (number, seconds) in row["summed"].items()
        },
        "memory": int(row["memory_bytes"]),
        "gpu": None if gpu is None else int(gpu),
    }


def _finite(value: Any) -> float:
    number = float(value)
    # JSON of a page has neither of these; a time is below the year 5138.
    if not 0 <= number < 1e11:
        raise ValueError("no time")
    return number
