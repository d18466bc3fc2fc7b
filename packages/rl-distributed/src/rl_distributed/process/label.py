"""What messages of other processes call this one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProcessLabel", "process_label", "set_process_label"]


@dataclass(frozen=True, slots=True)
class ProcessLabel:
    """Who this process is, for people."""

    role: str
    """What it is, whichever process has the part now: `worker 1 of group 'a'`."""
    role_id: str
    """The same, told apart from those of other groups of that name."""
    place: str
    """Where it runs: `node 10.0.0.1, pid 4711`."""

    def __str__(self) -> str:
        return f"{self.role} ({self.place})"


_label: ProcessLabel | None = None


def set_process_label(label: ProcessLabel) -> None:
    """Say who this process is."""
    global _label
    _label = label


def process_label() -> ProcessLabel | None:
    """Return who this process is; None: it has no part that others know of."""
    return _label
