"""The label of this process in messages of other processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProcessLabel", "process_label", "set_process_label"]


@dataclass(frozen=True, slots=True)
class ProcessLabel:
    """A process as messages describe it to people."""

    role: str
    """Its role, the same after a restart: `worker 1 of group 'a'`."""
    role_id: str
    """The same, but different for another group of that name."""
    place: str
    """Where it runs: `node 10.0.0.1, pid 4711`."""

    def __str__(self) -> str:
        return f"{self.role} ({self.place})"


_label: ProcessLabel | None = None


def set_process_label(label: ProcessLabel) -> None:
    """Set the label of this process."""
    global _label
    _label = label


def process_label() -> ProcessLabel | None:
    """Return the label of this process; None: it has no role that others know of."""
    return _label
