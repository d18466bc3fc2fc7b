"""Warnings and errors in the log files of a run, with repetitions merged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LogNote", "LogNotes"]

_LEVELS = ("WARNING", "ERROR", "CRITICAL")
# Only matching lines are parsed, as most have other levels.
_STARTED, _DATA = "rl_distributed.workers.journal", "rl_algorithms.data.module"
_WANTED = re.compile(
    rf'"level": ?"(?:WARNING|ERROR|CRITICAL)"|"{_STARTED}"|"{_DATA}"'.encode()
)
_NUMBER = re.compile(r"\d+(\.\d+)?")
_MOST = 200
"""Maximum number of distinct messages; further ones are only counted."""
_LONGEST = 4000


@dataclass
class LogNote:
    """A warning or error; messages that differ in numbers only are merged."""

    level: str
    logger: str
    message: str
    """Text of its first occurrence."""
    actor: str
    """Source of its first occurrence: the program (`driver`) or a worker group."""
    step: int | None
    """Step of its first occurrence, if it was within one."""
    first: str
    """Time of its first occurrence, in UTC, as ISO 8601."""
    last: str
    """Time of its last occurrence."""
    count: int = 1
    """Number of occurrences."""
    traceback: str | None = None
    """Traceback of the logged exception."""


@dataclass
class LogNotes:
    """Relevant lines of the log files of a run."""

    notes: list[LogNote] = field(default_factory=list)
    """Warnings and errors in order of their first occurrence."""
    num_left_out: int = 0
    """Number of messages beyond the maximum."""
    workers: list[str] = field(default_factory=list)
    """Starts of worker processes, with their place and versions."""
    data: list[str] = field(default_factory=list)
    """Messages about the data, such as numbers of rows and overlong ones."""

    @classmethod
    def read(cls, folder: Path) -> LogNotes:
        """Read all log files of a folder, skipping missing or truncated parts."""
        notes = cls()
        known: dict[tuple[str, str, str], LogNote] = {}
        found = [line for path in _files(folder) for line in _wanted_lines(path)]
        # Merged by time: each worker has a file of its own.
        for line in sorted(found, key=lambda line: str(line.get("time"))):
            if line.get("level") in _LEVELS:
                notes._add(line, known)
            elif line.get("logger") == _DATA:
                notes.data.append(str(line.get("message"))[:_LONGEST])
            else:
                # Without the settings, which are shown with the configuration.
                said = str(line.get("message")).partition("; settings:")[0]
                actor = f"{line.get('actor')}[{line.get('rank')}]"
                notes.workers.append(f"{actor}: {said}")
        notes.notes = list(known.values())
        return notes

    def _add(
        self, line: Mapping[str, Any], known: dict[tuple[str, str, str], LogNote]
    ) -> None:
        level, logger = str(line["level"]), str(line.get("logger", ""))
        message, time = str(line.get("message", "")), str(line.get("time", ""))
        # Without numbers: "step 17" and "step 18" are the same message.
        key = (level, logger, _NUMBER.sub("0", message))
        if key in known:
            known[key].count += 1
            known[key].last = time
        elif len(known) >= _MOST:
            self.num_left_out += 1
        else:
            step, exception = line.get("step"), line.get("exception")
            trace = exception.get("traceback") if isinstance(exception, dict) else None
            known[key] = LogNote(
                level=level,
                logger=logger,
                message=message[:_LONGEST],
                actor=str(line.get("actor", "driver")),
                step=step if isinstance(step, int) else None,
                first=time,
                last=time,
                # The end of a traceback names the error.
                traceback=None if trace is None else str(trace)[-_LONGEST:],
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the notes as JSON values."""
        return asdict(self)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl")) if folder.is_dir() else []


def _wanted_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield lines with warnings, errors, worker starts and data messages."""
    with open(path, "rb") as file:
        for raw in file:
            if not _WANTED.search(raw):
                continue
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line
