"""Records of a worker: its failure and its health."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl_distributed.failures.carried_exception import unpack_exception
from rl_distributed.failures.out_of_memory import OUT_OF_MEMORY

__all__ = ["FailureKind", "WorkerFailure", "WorkerHealth", "WorkerState"]

FailureKind = Literal[
    "raised", "died", "hung", "late", "cancelled", "released", "unplaced"
]
WorkerState = Literal["idle", "busy", "silent", "dead"]


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Failure of one worker; errors of worker groups carry it as `failure`."""

    group: str
    """Name of its group."""
    rank: int
    """Its rank in the group."""
    address: str
    """Address of its node."""
    pid: int | None
    """Its process; None: not known."""
    kind: FailureKind
    """raised: a method raised; died: the process is gone; hung: it gave no sign of
    life; late: a call ran past its own deadline; cancelled: it went on with a call that
    was cancelled; released: ended because it waited for a worker that failed; unplaced:
    no node has had room for it so far."""
    method: str = ""
    """The method that ran, where one did."""
    cause: str = ""
    """Why: the exception in one line, or how the process ended."""
    traceback: str = ""
    """The worker's own traceback; empty where it had none to send."""
    log_path: str = ""
    """Log file of the worker, on its node."""
    in_process_group: bool = False
    """Whether it shared a process group of torch with other workers."""
    lost_a_peer: bool = False
    """Whether it raised only because another worker was gone."""
    exception: bytes = field(default=b"", repr=False, compare=False)
    """The exception itself, pickled; empty where it cannot travel."""

    @property
    def label(self) -> str:
        """Name of the worker in messages."""
        return f"worker {self.rank} of group {self.group!r}"

    @property
    def is_out_of_memory(self) -> bool:
        """Whether Ray ended it because the memory of its node ran out."""
        return self.cause.startswith(OUT_OF_MEMORY)

    def raised(self) -> BaseException | None:
        """Return the exception that the method raised; None where it did not travel."""
        return unpack_exception(self.exception)


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """State of a worker; one line of `RayWorkerGroup.health`."""

    rank: int
    address: str
    """Address of its node."""
    pid: int
    state: WorkerState
    """idle, busy (a method runs), silent (no sign of life for longer than two beats)
    or dead."""
    method: str
    """The method that runs; empty: none."""
    method_s: float
    """For how long it has been running."""
    last_seen_s: float | None
    """Time since its last sign of life; None: it is not watched."""
    num_restarts: int
    """Number of restarts of this rank's worker."""
    failure: WorkerFailure | None = None
    """Why it is dead."""
