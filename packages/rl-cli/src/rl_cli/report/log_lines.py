"""Warnings and errors of the log files of a run, equal ones together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LogNote", "LogNotes"]

_LEVELS = ("WARNING", "ERROR", "CRITICAL")
# Most lines are of other levels; these are not parsed.
_STARTED, _DATA = "rl_distributed.workers.journal", "rl_algorithms.data.module"
_WANTED = re.compile(
    rf'"level": ?"(?:WARNING|ERROR|CRITICAL)"|"{_STARTED}"|"{_DATA}"'.encode()
)
_NUMBER = re.compile(r"\d+(\.\d+)?")
_MOST = 200
"""Different messages that are kept of a run; beyond that they are only counted."""
_LONGEST = 4000


@dataclass
class LogNote:
    """A warning or an error, as often as it was logged with other numbers in it."""

    level: str
    logger: str
    message: str
    """As it was logged first."""
    actor: str
    """Who logged it first: the program (`driver`) or a group of workers."""
    step: int | None
    """The step of the first one, where it was in one."""
    first: str
    """When it was logged first, in UTC, as ISO 8601."""
    last: str
    """When it was logged last."""
    count: int = 1
    """How often."""
    traceback: str | None = None
    """Of the exception that it was logged with."""


@dataclass
class LogNotes:
    """What the log files of a run say."""

    notes: list[LogNote] = field(default_factory=list)
    """In the order of their first appearance."""
    num_left_out: int = 0
    """Messages beyond the number that is kept."""
    workers: list[str] = field(default_factory=list)
    """Starts of worker processes: where, and with which versions."""
    data: list[str] = field(default_factory=list)
    """What was said about the data: rows, and those that are too long."""

    @classmethod
    def read(cls, folder: Path) -> LogNotes:
        """Read all log files of a folder; what is missing or torn is left out."""
        notes = cls()
        known: dict[tuple[str, str, str], LogNote] = {}
        found = [line for path in _files(folder) for line in _wanted_lines(path)]
        for line in sorted(found, key=lambda line: str(line.get("time"))):
            if line.get("level") in _LEVELS:
                notes._add(line, known)
            elif line.get("logger") == _DATA:
                notes.data.append(str(line.get("message"))[:_LONGEST])
            else:
                # The settings behind the versions stand in the configuration.
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
                traceback=None if trace is None else str(trace)[-_LONGEST:],
            )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl")) if folder.is_dir() else []


def _wanted_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield lines of warnings and errors, and of the starts of workers."""
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
