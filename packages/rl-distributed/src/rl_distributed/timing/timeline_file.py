"""`timeline.jsonl`: what the driver and its workers executed, a line per step.

The file is bounded: once full, it is rewritten with its first lines, which show the
start, and the newest ones. One line:

```
{"step": 3,                 the step; 0 and "is_start" is the time before the first one
 "is_start": false,
 "start_s": 1.7e9,          in seconds since the epoch
 "seconds": 2.5,            until the next line begins
 "methods": ["train"],
 "rows": [{"name": "embed[3]", "node": "10.0.0.7", "pid": 4711,
           "calls": [[0, 1000, 2000]],     method, start and duration in microseconds;
                                           the start counts from that of the line
           "summed": {"train": [2, 0.1]},  further short calls: number and seconds
           "memory_bytes": 1000000000, "gpu_memory_bytes": null}]}
```
A call still running when the line ends appears again in the next one, with the same
start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rl_distributed.json_lines import parse_records, step_of
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["TIMELINE", "TimelineFile", "read_timeline"]

TIMELINE = "timeline.jsonl"
"""Name of the file in the folder of a run."""

_MAX_BYTES = 4 << 20
_NUM_FIRST = 20


class TimelineFile:
    """Appends records and keeps the file below a size.

    Args:
        path: The file; its folder is created. Existing records are kept.
        max_bytes: Size at which the file is rewritten with half as much. A single
            record may be larger.
        num_first: Number of oldest records to keep; they take at most a quarter of the
            size.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = _MAX_BYTES, num_first: int = _NUM_FIRST
    ) -> None:
        self.path = path
        self._max_bytes, self._num_first = max_bytes, num_first
        create_private_folder(path.parent)
        # Drops a torn line, left by a killed writer.
        self._rewrite(self._lines())

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record.

        Raises:
            OSError: It cannot be written.
        """
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        self._file.write(line + b"\n")
        if self._file.tell() > self._max_bytes:
            self._file.close()
            self._rewrite(self._kept(self._lines()))

    def drop_after(self, step: int) -> None:
        """Drop the records of later steps, which will be repeated.

        Raises:
            OSError: It cannot be written.
        """
        self._file.close()
        self._rewrite([line for line in self._lines() if step_of(line) <= step])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self) -> list[bytes]:
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [line for line in lines if line.endswith(b"\n")]

    def _kept(self, lines: list[bytes]) -> list[bytes]:
        first: list[bytes] = []
        num_bytes = 0
        for line in lines[: self._num_first]:
            num_bytes += len(line)
            if num_bytes > self._max_bytes // 4:
                break
            first.append(line)
        newest: list[bytes] = []
        num_bytes = sum(map(len, first))
        for line in reversed(lines[len(first) :]):
            num_bytes += len(line)
            # The newest one is kept, whatever its size.
            if newest and num_bytes > self._max_bytes // 2:
                break
            newest.append(line)
        return [*first, *reversed(newest)]

    def _rewrite(self, lines: list[bytes]) -> None:
        # Written beside it and renamed, so that a reader never sees half of it.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb", opener=private_opener) as file:
                file.writelines(lines)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        # `close` closes it. Unbuffered, so that a page sees whole lines at once.
        self._file: BinaryIO = open(  # noqa: SIM115
            self.path, "ab", buffering=0, opener=private_opener
        )


def read_timeline(
    path: Path, *, num_first: int, num_newest: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the oldest and the newest records of a file, and its number of lines.

    Lines that are torn or hold no record are skipped.

    Args:
        path: The file; it may be missing.
        num_first: Number of the oldest records to return.
        num_newest: Number of the newest ones.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    kept = lines[:num_first]
    kept += lines[max(len(lines) - num_newest, len(kept)) :]
    return list(parse_records(kept)), len(lines)
