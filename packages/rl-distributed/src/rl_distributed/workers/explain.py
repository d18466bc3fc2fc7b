"""`FailureExplainer`: find the root cause when a wait for results fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from rl_distributed.errors import DistributedError, WorkerDiedError, WorkerError
from rl_distributed.failures.worker import WorkerFailure
from rl_distributed.workers.failures import (
    actor_of,
    cause_of_death,
    dead_actor,
    failure_error,
    is_vague,
    translate_failure,
)
from rl_distributed.workers.incidents import IncidentLog
from rl_distributed.workers.launch import LaunchedWorker
from rl_distributed.workers.node_watch import is_reached, reached

if TYPE_CHECKING:
    from rl_distributed.workers.policy import FailurePolicy

__all__ = ["FailureExplainer", "cause_of_loss"]

# How long the loss of a worker may take to be noticed after one that needed it raised.
_SETTLE_S = 3.0


class FailureExplainer:
    """Finds the root cause of errors that end waits for results of one group.

    Args:
        workers: by rank, as the supervisor keeps them.
        policy: what to do about failures.
        log: of the group; deaths that a wait notices first are recorded there.
    """

    def __init__(
        self, workers: list[LaunchedWorker], policy: FailurePolicy, log: IncidentLog
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._log = log

    def explain(
        self,
        error: BaseException,
        what: str,
        references: Sequence[Any],
        method_name: str = "",
    ) -> DistributedError:
        """Return the error to raise in place of Ray's.

        Args:
            error: The error of `ray.get`.
            what: The call, for the message.
            references: The results that were waited for.
            method_name: The method that was called.
        """
        actor_id = dead_actor(error)
        own = translate_failure(error, what)
        if isinstance(own, WorkerDiedError) and actor_id:
            return self._explain_death(own, actor_id, error, what, method_name)
        failure = own.failure if isinstance(own, WorkerError) else None
        # Without a process group, no other worker can be the cause.
        if failure is None or not failure.in_process_group:
            return own
        return self._explain_raise(own, failure, what, references, method_name)

    def _explain_death(
        self,
        own: WorkerError,
        actor_id: str,
        error: BaseException,
        what: str,
        method_name: str,
    ) -> DistributedError:
        root = self._log.root_of(actor_id)
        if root is None and is_vague(error):
            # Ray has lost its connection and does not know why; the watches may.
            self._log.wait_for(lambda: self._log.root_of(actor_id), _SETTLE_S)
            root = self._log.root_of(actor_id)
        if root is None:
            worker = next((w for w in self._workers if w.actor_id == actor_id), None)
            if worker is None:
                # Of another group, whose result was an argument here.
                return own
            # In a thread, because `record` also ends what is left of the process, which
            # takes seconds; this wait only needs the entry.
            threading.Thread(
                target=self._log.record,
                args=(worker, "died", cause_of_loss(worker, error)),
                name="investigate",
                daemon=True,
            ).start()
            self._log.wait_for(lambda: self._log.root_of(actor_id), _SETTLE_S)
            root = self._log.root_of(actor_id)
        return own if root is None else failure_error(root, what, method_name)

    def _explain_raise(
        self,
        own: DistributedError,
        failure: WorkerFailure,
        what: str,
        references: Sequence[Any],
        method_name: str,
    ) -> DistributedError:
        """Find out whether a worker that raised was the first of its process group."""
        if failure.lost_a_peer:
            # Its connection breaks before anybody else knows that the peer is gone.
            self._await_incident(failure.rank)
        incident = self._log.incident_of(failure.rank)
        if incident is not None and incident.root.kind != "raised":
            return failure_error(incident.root, what, method_name)
        finished, waiting = ray.wait(
            # `ray.wait` rejects duplicate references.
            list(dict.fromkeys(references)),
            num_returns=len(set(references)),
            # Peers that notice the failure raise within this time; the others would
            # wait for ever.
            timeout=self._policy.release_after_s,
            fetch_local=False,
        )
        if failure.lost_a_peer:
            own = _first_to_raise(own, finished, what)
        if waiting:
            root: WorkerFailure = own.failure  # type: ignore[attr-defined]
            self._release_waiting(root, {actor_of(ref) for ref in waiting})
        return own

    def _await_incident(self, rank: int) -> None:
        """Wait for the news of the loss that has made a worker raise."""

        def has_come() -> bool:
            return self._log.incident_of(rank) is not None

        self._log.wait_for(has_come, _SETTLE_S)
        nodes = {worker.seat.slot.node_id for worker in list(self._workers)}
        if not has_come() and nodes - reached(nodes):
            # A host that is switched off answers nothing: its loss is news only when
            # the watch of nodes gives it up.
            self._log.wait_for(has_come, self._policy.node_limit_s)

    def _release_waiting(self, root: WorkerFailure, actors: set[str]) -> None:
        """End the process group of a worker that raised: its peers wait for it."""
        self._log.begin(root)
        cause = f"it waited for {root.label}, which raised"
        waiting = [w for w in list(self._workers) if w.actor_id in actors]
        self._log.end(self._log.note_released(waiting, cause))
        self._log.release()


def cause_of_loss(worker: LaunchedWorker, error: BaseException) -> str:
    """Describe in one line why a worker is lost, or the node that it was on."""
    slot = worker.seat.slot
    if is_vague(error) and not is_reached(slot.node_id):
        return f"node lost: nothing of Ray answers at {slot.address}"
    return cause_of_death(error)


def _first_to_raise(
    own: DistributedError, finished: Sequence[Any], what: str
) -> DistributedError:
    """Return the error of a worker that did not fail for lack of a peer."""
    for reference in finished:
        try:
            # The call has ended; only its error still has to arrive.
            ray.get(reference, timeout=_SETTLE_S)
        except ray.exceptions.RayTaskError as error:
            other = translate_failure(error, what)
            failure = other.failure if isinstance(other, WorkerError) else None
            if failure is not None and not failure.lost_a_peer:
                return other
        # This worker died, which does not say who raised first.
        except ray.exceptions.RayError:
            continue
    return own
