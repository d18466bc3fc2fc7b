"""Decisions of the schedule of an asynchronous run, made again from its event log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rl_algorithms.asynchronous.event_log import first_change
from rl_algorithms.replay.result import ReplayDifference

__all__ = ["changed_decision"]


def changed_decision(folder: Path) -> ReplayDifference | None:
    """Return the first decision that a schedule of today would make otherwise.

    Args:
        folder: Folder of the event logs of a run; it need not exist.

    Raises:
        ScheduleError: A file is no event log.
    """
    for path in sorted(folder.glob("events_*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and not _is_whole(lines[-1]):  # the run was killed, or is running
            lines.pop()
        found = first_change(lines)
        if found is not None:
            number, recorded, replayed = found
            # The first line has the settings; the event itself comes after the step.
            first = int(path.stem.removeprefix("events_"))
            step = _completed(lines[1:number], first) + 1
            what = f"decision at event {number} of {path.name}"
            return ReplayDifference(step, what, recorded, replayed)
    return None


def _completed(lines: Iterable[str], first: int) -> int:
    """Return the number of steps that were completed after the events of a log.

    Args:
        lines: The events.
        first: Number of steps completed before them.
    """
    completed = first
    for line in lines:
        event = json.loads(line)["event"]
        if event["type"] == "StepTrained":
            completed = event["step"] + 1
        elif event["type"] == "TrainerReady" and event["incarnation"]:
            # A trainer that was lost goes back, and takes its steps again.
            state = event.get("state")
            completed = first if state is None else state["step"]
    return completed


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
