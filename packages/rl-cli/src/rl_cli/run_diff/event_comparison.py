"""Event logs of asynchronous training: the first event or decision that differs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_cli.run_diff.difference import Difference, Part, StagePair
from rl_distributed.metrics.sinks.jsonl import read_records

__all__ = ["compare_events"]

_FILES = "asynchronous/events_*.jsonl"
_TIMES = ("at_s",)


def compare_events(pair: StagePair, *, ended: bool) -> Part:
    """Compare the events and decisions of the log files that both stages have.

    Args:
        pair: The stages.
        ended: Whether both stages have ended with the same number of steps; otherwise,
            the end of a log is no difference.
    """
    name = pair[0].name
    files = [{path.name: path for path in s.folder.glob(_FILES)} for s in pair]
    shared = sorted(files[0].keys() & files[1].keys())
    if not shared:
        reason = "no event log in both (asynchronous.event_log)"
        return Part("events", name, reason=reason)
    num_events = 0
    for file in shared:
        step = 0
        logs = (_entries(each[file]) for each in files)
        for number, (a, b) in enumerate(zip_longest(*logs)):
            if (a is None or b is None) and not ended:
                break
            if a != b:
                what = f"event {number} of {file}" if number else f"start of {file}"
                found = Difference(what, *_parting(a, b), step)
                return Part(
                    "events", name, f"{num_events} events up to there", (found,), 1,
                    left_out=("times of events",),
                )  # fmt: skip
            num_events += 1
            step = max(step, _step_of(a))
    return Part("events", name, f"{num_events} events", left_out=("times of events",))


def _entries(path: Path) -> Iterator[Any]:
    for record in read_records(path):
        # The state of a resumed run holds times, and is compared with checkpoints.
        yield _timeless({k: v for k, v in record.items() if k != "state"})


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in (*_TIMES, "state")}
        return {key: _timeless(each) for key, each in kept.items()}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def _step_of(entry: Any) -> int:
    """Return the latest step whose training an entry started."""
    actions = entry.get("actions") or [] if isinstance(entry, dict) else []
    steps = [a.get("step") for a in actions if a.get("type") == "Train"]
    return max((step for step in steps if isinstance(step, int)), default=0)


def _parting(first: Any, second: Any) -> tuple[Any, Any]:
    """Return what differs: the event or, after equal events, the decisions."""
    for key in ("event", "actions"):
        values = [each.get(key) if each else None for each in (first, second)]
        if values[0] != values[1]:
            return values[0], values[1]
    return first, second
