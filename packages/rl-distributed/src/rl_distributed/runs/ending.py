"""State of a run: running, paused, finished, stopped, failed or interrupted.

```
RUN/.run.lock    held while a process carries the run out     -> running
RUN/.run.paused  there as well, or in the folder of a stage   -> paused
RUN/.run.ended   why the last process left before the end     -> failed, interrupted
RUN/result.json  result of the run                            -> finished, stopped
```
They are asked in this order. A run with none of them was killed: it is interrupted.
Imports nothing heavy, so that a listing of many runs is quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rl_distributed.file_lock import FolderLock
from rl_distributed.private_files import write_private_text
from rl_distributed.redaction import hide_values, redacted

__all__ = [
    "ENDED",
    "PAUSED",
    "RunEnding",
    "RunState",
    "forget_ending",
    "forget_pause",
    "note_ending",
    "note_pause",
    "read_ending",
    "run_state",
]

RunState = Literal["running", "paused", "finished", "stopped", "failed", "interrupted"]
"""State of a run; a stopped one was ended by somebody's request, with its result."""
ENDED = ".run.ended"
"""Name of the file, in the folder of the run."""
PAUSED = ".run.paused"
"""Name of the file that is there while a run is held, in its folder or its stage's."""
_RESULT = "result.json"
# Listings read this file for every run; the log has the full text.
_LONGEST_REASON = 2000


@dataclass(frozen=True)
class RunEnding:
    """Why a process left a run before its end."""

    state: Literal["failed", "interrupted"]
    """Whether the run failed, or was interrupted by a signal."""
    reason: str
    """The error: its class and its message, without secrets; of a signal the message
    alone."""
    time: str
    """When it was, in UTC, as ISO 8601."""
    notes: tuple[str, ...] = ()
    """First lines of the notes of the error, such as where it was raised."""


def note_ending(folder: Path, error: BaseException) -> None:
    """Write down which error ended a run.

    Raises:
        OSError: The folder cannot be written.
    """
    said = str(error)
    kind = type(error).__name__
    # An interruption is no Exception, so that no handler on its way swallows it. Its
    # message says that it is one.
    has_failed = isinstance(error, Exception)
    named = f"{kind}: {said}" if has_failed else said
    text = _hidden(named if said else kind)
    notes = getattr(error, "__notes__", ())
    ending = RunEnding(
        state="failed" if has_failed else "interrupted",
        reason=text,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(_hidden(note.partition("\n")[0]) for note in notes),
    )
    write_private_text(folder / ENDED, json.dumps(asdict(ending)) + "\n")


def _hidden(text: str) -> str:
    return hide_values(str(redacted(text)))[:_LONGEST_REASON]


def forget_ending(folder: Path) -> None:
    """Remove the note: the run begins, goes on, or has ended as it should.

    Raises:
        OSError: The folder cannot be written.
    """
    (folder / ENDED).unlink(missing_ok=True)


def read_ending(folder: Path) -> RunEnding | None:
    """Return why the last process left a run; None: there is no note."""
    try:
        found = json.loads((folder / ENDED).read_text(encoding="utf-8"))
        ending = RunEnding(
            state=found["state"],
            reason=str(found["reason"]),
            time=str(found["time"]),
            notes=tuple(map(str, found.get("notes", ()))),
        )
    # A torn or foreign note counts as none, so that it cannot break a list of runs.
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ending if ending.state in ("failed", "interrupted") else None


def note_pause(folder: Path, by: str) -> None:
    """Write down that a run is held, and who asked for it.

    Raises:
        OSError: The folder cannot be written.
    """
    time = datetime.now(UTC).isoformat(timespec="seconds")
    write_private_text(folder / PAUSED, json.dumps({"by": by, "time": time}) + "\n")


def forget_pause(folder: Path) -> None:
    """Remove the note: the run goes on, or begins.

    Raises:
        OSError: The folder cannot be written.
    """
    (folder / PAUSED).unlink(missing_ok=True)


def run_state(folder: Path) -> RunState:
    """Return how the run of a folder stands."""
    try:
        lock = FolderLock(folder, "looking how the run stands", name="run")
        if lock.owner() is not None:
            # A note that a killed process has left says nothing without the lock.
            notes = (folder / PAUSED, *folder.glob(f"stages/*/{PAUSED}"))
            return "paused" if any(note.exists() for note in notes) else "running"
    except OSError:
        pass  # the lock file of somebody else, which this process may not open
    if (ending := read_ending(folder)) is not None:
        return ending.state
    return _ended_state(folder / _RESULT)


def _ended_state(result: Path) -> RunState:
    """Return the state of a run that no process carries out, and that has no note."""
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except OSError:
        return "interrupted"
    except ValueError:
        return "finished"  # a torn or foreign file says no more than that it is there
    stopped_by = found.get("stopped_by") if isinstance(found, dict) else None
    return "finished" if stopped_by is None else "stopped"
