"""The workers of a run and the schedule's record of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

__all__ = [
    "TRAINER",
    "Worker",
    "WorkerKind",
    "WorkerPhase",
    "WorkerRecord",
    "Workforce",
]

WorkerKind = Literal["trainer", "generator", "environment"]


class Worker(NamedTuple):
    """A position in the run; each process that fills it is one of its incarnations."""

    kind: WorkerKind
    rank: int

    def __str__(self) -> str:
        return self.kind if self.kind == "trainer" else f"{self.kind} {self.rank}"


TRAINER = Worker("trainer", 0)
"""All ranks of the trainer: they share collectives, so they fail and restart as one."""


class WorkerPhase(Enum):
    """Life cycle of a worker."""

    ABSENT = "absent"
    """Never started."""
    STARTING = "starting"
    READY = "ready"
    RESTING = "resting"
    """Failed; to be restarted after a pause."""
    RETIRED = "retired"
    """Failed too often to be restarted."""


@dataclass(slots=True)
class WorkerRecord:
    """State of a worker, as far as the schedule knows it."""

    worker: Worker
    phase: WorkerPhase = WorkerPhase.ABSENT
    incarnation: int = -1
    """Index of the current start; messages from earlier incarnations are ignored."""
    heard_s: float = 0.0
    """Time of the last message from the current incarnation."""
    failures_in_row: int = 0
    tasks: set[int] = field(default_factory=set)
    """Answers or scores in flight on this worker."""


class Workforce:
    """All workers of a run.

    Args:
        num_generators: Number of generators.
        num_environments: Number of environments.
    """

    def __init__(self, num_generators: int, num_environments: int) -> None:
        places = [
            TRAINER,
            *(Worker("generator", rank) for rank in range(num_generators)),
            *(Worker("environment", rank) for rank in range(num_environments)),
        ]
        self._records = {worker: WorkerRecord(worker) for worker in places}
        self.generators = self._of_kind("generator")
        self.environments = self._of_kind("environment")

    def _of_kind(self, kind: WorkerKind) -> tuple[WorkerRecord, ...]:
        return tuple(r for r in self._records.values() if r.worker.kind == kind)

    def __getitem__(self, worker: Worker) -> WorkerRecord:
        return self._records[worker]

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._records

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def is_current(self, worker: Worker, incarnation: int) -> bool:
        """Return whether a message comes from the current process of a worker."""
        record = self._records[worker]
        alive = record.phase in (WorkerPhase.STARTING, WorkerPhase.READY)
        return alive and record.incarnation == incarnation

    def is_gone(self, kind: WorkerKind) -> bool:
        """Return whether every worker of this kind has been retired."""
        return all(
            record.phase is WorkerPhase.RETIRED
            for record in self._records.values()
            if record.worker.kind == kind
        )
