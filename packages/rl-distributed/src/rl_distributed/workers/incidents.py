"""`IncidentLog`: the failures of a group's workers, and which one came first.

The first failure is the *root* of an incident. Until the group has recovered, failures
that follow from it are reported as the root. Recording a failure terminates the rest of
the process and releases its process-group peers, which would wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_distributed.failures.worker import FailureKind, WorkerFailure
from rl_distributed.security.audit import audit
from rl_distributed.workers.failures import place_of
from rl_distributed.workers.group_watch import GroupWatch
from rl_distributed.workers.launch import LaunchedWorker
from rl_distributed.workers.processes import end_processes, kill_on_node

if TYPE_CHECKING:
    from rl_distributed.workers.policy import FailurePolicy

__all__ = ["ASK_S", "END_S", "Incident", "IncidentLog", "released"]

logger = logging.getLogger(__name__)

ASK_S = 2.0
"""How long a worker that is well may take to answer the watch."""
END_S = 5.0
"""How long the end of processes may take."""


@dataclass(slots=True)
class Incident:
    """The failure of one worker and everything that follows from it."""

    root: WorkerFailure
    at: float
    """`time.monotonic()` of the root."""
    open_releases: int = 0
    """Threads that still look for workers to release."""


class IncidentLog:
    """The failures of one group.

    Args:
        workers: by rank; restarted workers are put in their places.
        policy: what to do about failures.
        watch: of the group.
    """

    def __init__(
        self, workers: list[LaunchedWorker], policy: FailurePolicy, watch: GroupWatch
    ) -> None:
        self.incident: Incident | None = None
        self.failed: dict[int, WorkerFailure] = {}
        """Why the present worker of a rank is gone."""
        self.num_restarts: Counter[int] = Counter()
        self.is_closed = False
        self.stop = threading.Event()
        """Set by `close`; what pauses waits for it."""
        self._roots: dict[str, WorkerFailure] = {}
        self._workers = workers
        self._policy = policy
        self._watch = watch
        # Reentrant: `note` begins an incident under it.
        self._changed = threading.Condition(threading.RLock())

    def close(self) -> None:
        """Record nothing more: workers that end from now on end on purpose."""
        self.is_closed = True
        self.stop.set()

    # --- entering failures --------------------------------------------------------

    def record(self, worker: LaunchedWorker, kind: FailureKind, cause: str) -> None:
        """Record a failed worker, end the rest of its process and release others."""
        if self._enter(worker, kind, cause):
            self.end([worker])
            self.release()

    def record_lost_node(self, node_id: str, cause: str) -> None:
        """Record that all workers of a lost node are gone, and release others."""
        gone = [
            worker
            for worker in list(self._workers)
            if worker.seat.slot.node_id == node_id
            and self._enter(worker, "died", f"node lost: {cause}")
        ]
        if gone:
            # No Ray process is left there to end them. The message may still reach
            # them, perhaps late: they must not run beside their successors.
            for worker in gone:
                self._watch.end(worker.seat.rank)
            end_processes(gone, END_S, at_once=True)
            self.release()

    def _enter(self, worker: LaunchedWorker, kind: FailureKind, cause: str) -> bool:
        place = place_of(worker.actor_id)
        if place is None or self.is_closed:
            return False
        seen = self._watch.seen().get(worker.seat.rank)
        method = seen.beat.method if seen is not None else ""
        failure = place.failed(kind, cause, method)
        is_new = self.note(worker, failure)
        if is_new:
            logger.warning("%s %s: %s", failure.label, kind, cause)
            audit("worker.failed", failure.label, "failed", kind=kind, cause=cause)
        return is_new

    def note(self, worker: LaunchedWorker, failure: WorkerFailure) -> bool:
        """Enter a failure; False if this process's end was known already."""
        rank = worker.seat.rank
        with self._changed:
            if self.is_closed or rank in self.failed:
                return False
            # News of a process that was replaced must not end its successor.
            if self._workers[rank] is not worker:
                return False
            incident = self.begin(failure)
            self.failed[rank] = failure
            if worker.actor is not None:
                # By Ray's id, which is all that an error of Ray names.
                self._roots[worker.actor_id] = incident.root
            self._changed.notify_all()
        # Its silence is no news any more.
        self._watch.forget(rank)
        return True

    def begin(self, root: WorkerFailure) -> Incident:
        """Return the incident that is open, or open one."""
        with self._changed:
            if self.incident is None:
                self.incident = Incident(root, time.monotonic())
            return self.incident

    def note_released(
        self, workers: Sequence[LaunchedWorker], cause: str
    ) -> list[LaunchedWorker]:
        """Enter workers that end because of another; return those that were up."""
        return [w for w in workers if self.note(w, released(w, cause))]

    def put_in_place(self, fresh: Sequence[LaunchedWorker]) -> None:
        """Enter restarted workers; close the incident if no failure is left."""
        with self._changed:
            for worker in fresh:
                rank = worker.seat.rank
                self._workers[rank] = worker
                self.failed.pop(rank, None)
                # The first process of a rank that had to wait for a node is no restart.
                self.num_restarts[rank] += worker.incarnation > 0
            left = next(iter(self.failed.values()), None)
            # Another one may have failed since.
            self.incident = None if left is None else Incident(left, time.monotonic())

    # --- ending and releasing -----------------------------------------------------

    def end(self, workers: Sequence[LaunchedWorker]) -> None:
        """End processes on any node."""
        end_processes(workers, END_S, at_once=True)
        for worker in workers:
            # On another node: only Ray can end it there.
            if worker.process is None and worker.actor is not None:
                kill_on_node(worker)

    def release(self) -> None:
        """End the workers whose process group has lost a member."""
        incident = self.incident
        if incident is None:
            return
        with self._changed:
            # Counted, so that a restart waits for those that are about to be ended as
            # well.
            incident.open_releases += 1
        try:
            # They wait in a collective for one that will never come; nothing but their
            # end releases them.
            survivors = self._survivors()
            fresh = self._watch.ask([w.seat.rank for w in survivors], ASK_S)
            # On a busy machine a worker may get no turn to answer.
            # Its last beat counts then.
            beats = {r: seen.beat for r, seen in self._watch.seen().items()} | fresh
            joined = [
                worker
                for worker in survivors
                if (beat := beats.get(worker.seat.rank)) and beat.in_process_group
            ]
            if any(beats[worker.seat.rank].method for worker in joined):
                # Some notice by themselves, and their own error says more than that
                # they were ended.
                self.stop.wait(self._policy.release_after_s)
            cause = (
                f"it shared a process group with {incident.root.label}, which failed"
            )
            self.end(self.note_released(joined, cause))
        finally:
            with self._changed:
                incident.open_releases -= 1
                self._changed.notify_all()

    def _survivors(self) -> list[LaunchedWorker]:
        """Workers that are up and may share a process group with one that is not."""
        workers = list(self._workers)
        alive = [w for w in workers if w.seat.rank not in self.failed]
        if self._policy.release == "group":
            return alive
        hit = {w.seat.tied_group for w in workers if w.seat.rank in self.failed}
        return [worker for worker in alive if worker.seat.tied_group in hit]

    # --- asking and waiting -------------------------------------------------------

    def root_of(self, actor_id: str) -> WorkerFailure | None:
        """Return the root of the incident in which an actor of Ray ended."""
        return self._roots.get(actor_id)

    def incident_of(self, rank: int) -> Incident | None:
        """Return the incident that is open, if it can be why this worker failed."""
        if self._policy.release == "group":
            return self.incident
        own = self._workers[rank].seat.tied_group
        tied = [w.seat.rank for w in self._workers if w.seat.tied_group == own]
        return self.incident if self.failed_among(tied) else None

    def failed_among(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Return the ranks whose worker is gone, in order; of all if None."""
        with self._changed:
            return sorted(
                rank for rank in self.failed if ranks is None or rank in ranks
            )

    def wait_for(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until a condition holds that a change of this log may bring about."""
        with self._changed:
            self._changed.wait_for(lambda: bool(condition()), timeout_s)


def released(worker: LaunchedWorker, cause: str) -> WorkerFailure:
    """Return the failure of a worker that is ended because of another."""
    place = place_of(worker.actor_id)
    if place is None:
        description = worker.description
        return WorkerFailure(
            "", worker.seat.rank, "", description.pid, "released", cause=cause
        )
    return place.failed("released", cause)
