"""`EventLog`: a record of events and actions from which a schedule can be replayed.

```python
log = EventLog(schedule.settings)
actions = log.record(schedule, event)
file.writelines(f"{line}\n" for line in log.take_lines())
...
replay(EventLog.from_lines(file))
```
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from rl_algorithms.asynchronous.actions import Action
from rl_algorithms.asynchronous.events import Event
from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.settings import ScheduleSettings, WaitLimits
from rl_algorithms.asynchronous.workers import Worker
from rl_algorithms.errors import ScheduleError

__all__ = ["Entry", "EventLog", "first_change", "replay"]

_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}


@dataclass(frozen=True, slots=True)
class Entry:
    """An event and the actions that it led to."""

    event: Event
    actions: list[Action]


@dataclass
class EventLog:
    """All events of a schedule since its start, with its actions."""

    settings: ScheduleSettings
    state: Mapping[str, Any] | None = None
    """State that the schedule was resumed from; None for a new run."""
    entries: list[Entry] = field(default_factory=list)
    """Recorded entries that `take_lines` has not removed yet."""
    has_begun: bool = field(default=False, init=False)
    """Whether `take_lines` has returned the line with the settings."""

    def record(self, schedule: Schedule, event: Event) -> list[Action]:
        """Pass an event to the schedule, record it, and return the actions."""
        actions = schedule.on(event)
        self.entries.append(Entry(event, actions))
        return actions

    def to_lines(self) -> Iterable[str]:
        """Return the log as JSON lines: settings and state, then one line per entry."""
        settings = dataclasses.asdict(self.settings)
        yield json.dumps({"settings": settings, "state": self.state})
        for entry in self.entries:
            actions = [_encode(action) for action in entry.actions]
            yield json.dumps({"event": _encode(entry.event), "actions": actions})

    def take_lines(self) -> list[str]:
        """Return the new lines of `to_lines` and drop them from memory.

        A driver that regularly appends them to a file can log a long run while keeping
        little of it in memory.
        """
        # The first line holds settings and state, and is written only once.
        lines = list(self.to_lines())[self.has_begun :]
        self.entries, self.has_begun = [], True
        return lines

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> EventLog:
        """Read settings, state and events; `replay` works out the actions.

        Raises:
            ScheduleError: The lines are not the log of a schedule.
        """
        # Logged actions are not read back: a replay exists to compare what today's code
        # decides with them.
        entries = [json.loads(line) for line in lines]
        if not entries or "settings" not in entries[0]:
            raise ScheduleError(
                "a log of a schedule must begin with its settings: got "
                f"{str(entries[:1])[:80]}"
            )
        settings = dict(entries[0]["settings"])
        settings["restarts"] = RestartPolicy(**settings["restarts"])
        if settings.get("trainer_restarts") is not None:
            settings["trainer_restarts"] = RestartPolicy(**settings["trainer_restarts"])
        settings["limits"] = WaitLimits(**settings["limits"])
        log = cls(ScheduleSettings(**settings), entries[0]["state"])
        log.entries = [Entry(_decode(entry["event"]), []) for entry in entries[1:]]
        return log


def replay(log: EventLog) -> list[list[Action]]:
    """Return the actions of a new schedule for the events of a log, event by event."""
    schedule = Schedule(log.settings)
    if log.state is not None:
        schedule.load_state_dict(log.state)
    return [schedule.on(entry.event) for entry in log.entries]


def first_change(lines: Sequence[str]) -> tuple[int, list[Any], list[Any]] | None:
    """Return the first event after which a schedule decides otherwise than logged.

    Args:
        lines: Lines of `EventLog.to_lines`.

    Returns:
        Number of the event, from 1, the logged actions and those of today's code; None
        if all are the same.

    Raises:
        ScheduleError: The lines are not the log of a schedule.
    """
    decided = replay(EventLog.from_lines(lines))
    for number, (line, actions) in enumerate(
        zip(lines[1:], decided, strict=True), start=1
    ):
        logged = json.loads(line)["actions"]
        # Through JSON, which turns tuples into lists as in the log.
        now = json.loads(json.dumps([_encode(action) for action in actions]))
        if now != logged:
            return number, logged, now
    return None


def _encode(value: Event | Action) -> dict[str, Any]:
    return {"type": type(value).__name__, **dataclasses.asdict(value)}


def _decode(values: Mapping[str, Any]) -> Event:
    known = _EVENTS.get(values.get("type", ""))
    if known is None:
        raise ScheduleError(
            f"an entry of a log must be an event: got type {values.get('type')!r}; "
            f"known are {', '.join(_EVENTS)}"
        )
    fields = {name: value for name, value in values.items() if name != "type"}
    if "worker" in fields:
        # JSON has turned the named tuple into a list.
        fields["worker"] = Worker(*fields["worker"])
    event: Event = known(**fields)
    return event
