"""`GroupSupervisor`: from signs of trouble to a reason, and to workers that run again.

```
GroupWatch ---event---> investigate (a thread of its own)
a wait for results ---error---> explain
   both: record the failure, end what is left of the process, release those that wait
the next wait or call (its own thread): recover = restart, on_restart, go on
```
The first failure is the *root* of an incident; what fails because of it, until the
group has recovered, is reported as the root. Nothing here runs while all is well.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from rl_distributed.audit import audit
from rl_distributed.errors import (
    DeadlineExceededError,
    DistributedError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from rl_distributed.workers.failures import (
    actor_of,
    cause_of_death,
    failure_error,
    place_of,
    translate_failure,
)
from rl_distributed.workers.launch import LaunchedWorker
from rl_distributed.workers.policy import RestartGroup, _Restart
from rl_distributed.workers.processes import (
    end_processes,
    is_stopped,
    kill_on_node,
    process_state,
)
from rl_distributed.workers.reports import (
    FailureKind,
    WorkerFailure,
    WorkerHealth,
    WorkerState,
)
from rl_distributed.workers.watch import GroupWatch, WatchEvent

if TYPE_CHECKING:
    from rl_distributed.workers.group import RayWorkerGroup
    from rl_distributed.workers.policy import FailurePolicy

__all__ = ["GroupSupervisor", "Incident"]

logger = logging.getLogger(__name__)

# How long Ray may take to tell how a process ended.
_CAUSE_S = 3.0
# How long the loss of a worker may take to be noticed after one that needed it raised.
_SETTLE_S = 3.0
_ASK_S = 2.0
_END_S = 5.0
_SECOND = 1.0


@dataclass(slots=True)
class Incident:
    """What began with the failure of one worker."""

    root: WorkerFailure
    at: float
    """`time.monotonic()` of the root."""
    open_releases: int = 0
    """Threads that still look for workers to release."""


@dataclass(slots=True)
class _State:
    """What the supervisor knows; under its lock."""

    failed: dict[int, WorkerFailure] = field(default_factory=dict)
    """Why the present worker of a rank is gone."""
    roots: dict[str, WorkerFailure] = field(default_factory=dict)
    """By Ray's actor id: the root of the incident in which an actor ended."""
    restarts: list[float] = field(default_factory=list)
    num_restarts: Counter[int] = field(default_factory=Counter)


class GroupSupervisor:
    """Supervises the workers of one group.

    Args:
        name: of the group, for messages.
        policy: what to do about failures.
        workers: by rank; restarted workers are put in their places.
        address: the address that the workers reach this process at.
    """

    def __init__(
        self,
        name: str,
        policy: FailurePolicy,
        workers: list[LaunchedWorker],
        address: str,
    ) -> None:
        self.name = name
        self.policy = policy
        self.incident: Incident | None = None
        self._workers = workers
        self._state = _State()
        self._changed = threading.Condition(threading.RLock())
        self._recovery = threading.RLock()
        self._is_recovering = False
        self._given_up: DistributedError | None = None
        self._is_closed = False
        self._stop = threading.Event()
        # The watch's thread must not keep a group alive that nobody uses any more.
        notice = weakref.WeakMethod(self._notice)

        def on_event(event: WatchEvent) -> None:
            method = notice()
            if method is not None:
                method(event)

        self.watch = GroupWatch(name, address, policy.heartbeat_limit_s, on_event)

    def expect(self, workers: Sequence[LaunchedWorker]) -> None:
        """Watch these workers, which are up."""
        for worker in workers:
            pid = None if worker.process is None else worker.process.pid
            self.watch.expect(worker.seat.rank, worker.incarnation, pid)
            if not worker.description.is_watched:
                logger.warning(
                    "worker %d of group %r cannot reach its driver at %s; its death is "
                    "noticed by the calls that wait for it, and a hang is not",
                    worker.seat.rank,
                    self.name,
                    self.watch.target(0, 0).address,
                )

    def close(self) -> None:
        """Stop watching; what ends from now on ends on purpose."""
        self._is_closed = True
        self._stop.set()
        self.watch.close()

    # --- what has failed ----------------------------------------------------------

    def _notice(self, event: WatchEvent) -> None:
        """Called in the watch's thread, which must not wait for anything."""
        if not self._is_closed:
            threading.Thread(
                target=self._investigate, args=(event,), name="investigate", daemon=True
            ).start()

    def _investigate(self, event: WatchEvent) -> None:
        workers = [
            self._workers[rank]
            for rank, incarnation in event.who
            if rank < len(self._workers)
            and self._workers[rank].incarnation == incarnation
        ]
        for worker in workers:
            if event.kind == "quiet":
                self._tell_of_quiet(worker, event.detail)
            elif event.kind in ("died", "lost"):
                cause = self._cause_of(worker, certain=event.kind == "died")
                if cause:
                    self.record(worker, "died", cause)
            elif event.kind == "late":
                self.record(worker, "late", event.detail)
            elif is_stopped(worker) or not self.watch.ask([worker.seat.rank], _ASK_S):
                # One that only had no turn on a busy machine has answered by now.
                self.record(worker, "hung", event.detail + process_state(worker))

    def _tell_of_quiet(self, worker: LaunchedWorker, detail: str) -> None:
        """Say early what may become a failure at the heartbeat limit."""
        seen = self.watch.seen().get(worker.seat.rank)
        method = seen.beat.method if seen is not None else ""
        logger.warning(
            "worker %d of group %r on node %s%s: %s%s",
            worker.seat.rank,
            self.name,
            worker.seat.slot.address,
            f", in method {method!r}" if method else "",
            detail,
            process_state(worker),
        )

    def _cause_of(self, worker: LaunchedWorker, certain: bool) -> str:
        """How a process ended; empty if it may not have."""
        try:
            ray.get(worker.handle.answer.remote(), timeout=_CAUSE_S)
        except ray.exceptions.GetTimeoutError:
            return "its process has ended" if certain else ""
        except ray.exceptions.RayError as error:
            return cause_of_death(error)
        return ""

    def record(self, worker: LaunchedWorker, kind: FailureKind, cause: str) -> None:
        """Note that a worker has failed, end what is left of it and release others."""
        place = place_of(worker.actor_id)
        if place is None or self._is_closed:
            return
        seen = self.watch.seen().get(worker.seat.rank)
        method = seen.beat.method if seen is not None else ""
        failure = place.failed(kind, cause, method)
        if self._note(worker, failure):
            logger.warning("%s %s: %s", failure.label, kind, cause)
            audit("worker.failed", failure.label, "failed", kind=kind, cause=cause)
            self._end([worker])
            self._release()

    def _note(self, worker: LaunchedWorker, failure: WorkerFailure) -> bool:
        """Enter a failure; False if this process's end was known already."""
        rank = worker.seat.rank
        with self._changed:
            if self._is_closed or rank in self._state.failed:
                return False
            if self._workers[rank] is not worker:
                return False
            if self.incident is None:
                self.incident = Incident(failure, time.monotonic())
            self._state.failed[rank] = failure
            self._state.roots[worker.actor_id] = self.incident.root
            self._changed.notify_all()
        self.watch.forget(rank)
        return True

    def _end(self, workers: Sequence[LaunchedWorker]) -> None:
        end_processes(workers, _END_S, at_once=True)
        for worker in workers:
            if worker.process is None:
                kill_on_node(worker)

    def _release(self) -> None:
        """End the workers that share a process group, which one of them has left."""
        incident = self.incident
        if incident is None:
            return
        with self._changed:
            incident.open_releases += 1
        try:
            survivors = [
                worker
                for worker in list(self._workers)
                if worker.seat.rank not in self._state.failed
            ]
            beats = self.watch.ask([w.seat.rank for w in survivors], _ASK_S)
            joined = [
                worker
                for worker in survivors
                if (beat := beats.get(worker.seat.rank)) and beat.in_process_group
            ]
            if any(beats[worker.seat.rank].method for worker in joined):
                self._stop.wait(self.policy.release_after_s)
            cause = (
                f"it shared a process group with {incident.root.label}, which failed"
            )
            released = [
                worker
                for worker in joined
                if self._note(worker, _released(worker, cause))
            ]
            self._end(released)
        finally:
            with self._changed:
                incident.open_releases -= 1
                self._changed.notify_all()

    # --- what a wait or a call asks -----------------------------------------------

    def explain(
        self,
        error: BaseException,
        what: str,
        references: Sequence[Any],
        method_name: str = "",
    ) -> DistributedError:
        """What really went wrong when a wait for these references failed."""
        actor_id = str(getattr(error, "actor_id", "") or "")
        own = translate_failure(error, what)
        if isinstance(own, WorkerDiedError) and actor_id:
            return self._explain_death(own, actor_id, error, what, method_name)
        failure: WorkerFailure | None = getattr(own, "failure", None)
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
        root = self._state.roots.get(actor_id)
        if root is None:
            worker = next((w for w in self._workers if w.actor_id == actor_id), None)
            if worker is None:
                # Of another group, whose result was an argument here.
                return own
            self._in_thread(lambda: self.record(worker, "died", cause_of_death(error)))
            with self._changed:
                self._changed.wait_for(
                    lambda: actor_id in self._state.roots, timeout=_SETTLE_S
                )
            root = self._state.roots.get(actor_id)
        return own if root is None else failure_error(root, what, method_name)

    def _explain_raise(
        self,
        own: DistributedError,
        failure: WorkerFailure,
        what: str,
        references: Sequence[Any],
        method_name: str,
    ) -> DistributedError:
        """One of those that talk to each other raised: was it the first to fail?"""
        if failure.lost_a_peer:
            # Its connection breaks before anybody else knows that the peer is gone.
            with self._changed:
                self._changed.wait_for(lambda: self.incident is not None, _SETTLE_S)
        incident = self.incident
        if incident is not None and incident.root.kind != "raised":
            return failure_error(incident.root, what, method_name)
        finished, waiting = ray.wait(
            list(dict.fromkeys(references)),
            num_returns=len(set(references)),
            timeout=self.policy.release_after_s,
            fetch_local=False,
        )
        if failure.lost_a_peer:
            own = self._first_to_raise(own, finished, what)
        if waiting:
            root: WorkerFailure = own.failure  # type: ignore[attr-defined]
            self._release_waiting(root, {actor_of(ref) for ref in waiting})
        return own

    def _first_to_raise(
        self, own: DistributedError, finished: Sequence[Any], what: str
    ) -> DistributedError:
        for reference in finished:
            try:
                ray.get(reference, timeout=_SETTLE_S)
            except ray.exceptions.RayTaskError as error:
                other = translate_failure(error, what)
                failure: WorkerFailure | None = getattr(other, "failure", None)
                if failure is not None and not failure.lost_a_peer:
                    return other
            except ray.exceptions.RayError:
                continue
        return own

    def _release_waiting(self, root: WorkerFailure, actors: set[str]) -> None:
        """End those that wait in a process group for one that raised, and all in it."""
        with self._changed:
            if self.incident is None:
                self.incident = Incident(root, time.monotonic())
        cause = f"it waited for {root.label}, which raised"
        waiting = [
            worker
            for worker in list(self._workers)
            if worker.actor_id in actors
            and self._note(worker, _released(worker, cause))
        ]
        self._end(waiting)
        self._release()

    def check(self, group: RayWorkerGroup, ranks: Sequence[int], what: str) -> None:
        """Before a call in an incident: restart, or refuse what cannot run.

        Raises:
            WorkerError: a worker that the call needs has failed, and stays away.
        """
        if self.policy.restarts:
            self.recover(group)
            return
        incident = self.incident
        missing = [rank for rank in ranks if rank in self._state.failed]
        if incident is not None and missing:
            raise failure_error(incident.root, what)

    # --- restarting ---------------------------------------------------------------

    def recover(self, group: RayWorkerGroup) -> None:
        """Restart what failed, if the policy says so and has tries left.

        Raises:
            WorkerError: there were too many restarts, or the workers do not come up.
        """
        policy = self.policy
        if self.incident is None or not isinstance(policy, _Restart):
            return
        with self._recovery:
            # Calls of `on_restart` come here as well, and find the workers up.
            if self._is_recovering:
                return
            if self._given_up is not None:
                raise self._given_up
            self._is_recovering = True
            try:
                while self.incident is not None and not self._is_closed:
                    self._restart(group, policy, self.incident)
            finally:
                self._is_recovering = False

    def restart(self, group: RayWorkerGroup, ranks: Sequence[int]) -> list[int]:
        """Start those of these workers again that have failed; others go on meanwhile.

        Returns:
            The ranks that were started again.

        Raises:
            WorkerStartError: one does not come up.
            DeadlineExceededError: not in time.
        """
        with self._recovery:
            with self._changed:
                failed = [rank for rank in ranks if rank in self._state.failed]
            if failed:
                self._put_in_place(group.relaunch(failed))
            return failed

    def _restart(
        self, group: RayWorkerGroup, policy: _Restart, incident: Incident
    ) -> None:
        pause_s = policy.pause_before(self._state.restarts)
        if pause_s is None:
            self._give_up(policy, incident)
        self._stop.wait(pause_s)
        self._state.restarts.append(time.monotonic())
        with self._changed:
            # Also those that are to be released along with the first.
            self._changed.wait_for(
                lambda: not incident.open_releases,
                _ASK_S + policy.release_after_s + _END_S,
            )
        ranks = self._ranks_to_restart(policy, incident)
        if not ranks:
            self._put_in_place([])
            return
        logger.warning(
            "restarting %s of group %r, because %s %s",
            ranks,
            self.name,
            incident.root.label,
            incident.root.kind,
        )
        try:
            fresh = group.relaunch(ranks)
        except (WorkerStartError, DeadlineExceededError) as error:
            logger.warning("restart of group %r failed: %s", self.name, error)
            return
        self._put_in_place(fresh)
        if policy.on_restart is None:
            return
        try:
            policy.on_restart(group, ranks)
        except Exception as error:
            if self.incident is None:
                # No worker failed: it is the callback that cannot restore the state.
                self._given_up = WorkerError(
                    f"group {self.name!r} has no state after a restart, because "
                    f"on_restart raised {type(error).__name__}: {error}; shut it down"
                )
                self.incident = incident
                raise

    def _ranks_to_restart(self, policy: _Restart, incident: Incident) -> list[int]:
        if isinstance(policy, RestartGroup):
            cause = f"its group is restarted after the failure of {incident.root.label}"
            others = [
                worker
                for worker in list(self._workers)
                if self._note(worker, _released(worker, cause))
            ]
            self._end(others)
        with self._changed:
            return sorted(self._state.failed)

    def _put_in_place(self, fresh: Sequence[LaunchedWorker]) -> None:
        if self._is_closed:
            # The group was shut down meanwhile.
            self._end(fresh)
            return
        with self._changed:
            for worker in fresh:
                rank = worker.seat.rank
                self._workers[rank] = worker
                self._state.failed.pop(rank, None)
                self._state.num_restarts[rank] += 1
            left = next(iter(self._state.failed.values()), None)
            # Another one may have failed since.
            self.incident = None if left is None else Incident(left, time.monotonic())
        self.expect(fresh)

    def _give_up(self, policy: _Restart, incident: Incident) -> None:
        last = failure_error(incident.root, "after its last restart")
        error = WorkerDiedError(
            f"group {self.name!r} gives up after {policy.max_restarts} restarts within "
            f"{policy.within_s:g} s (max_restarts); the last failure: {last}"
        )
        error.failure = incident.root
        self._given_up = error
        raise error

    # --- how the workers are ------------------------------------------------------

    def failure_since(self, began: float) -> WorkerFailure | None:
        """The root of the incident that is open, if it began after a wait did."""
        incident = self.incident
        if incident is None or incident.at < began:
            return None
        return incident.root

    def health(self) -> list[WorkerHealth]:
        """How each worker is, by rank."""
        now = time.monotonic()
        seen = self.watch.seen()
        reports = []
        for rank, worker in enumerate(list(self._workers)):
            last = seen.get(rank)
            failure = self._state.failed.get(rank)
            state: WorkerState = "idle"
            method, method_s, last_seen_s = "", 0.0, None
            if last is not None and last.is_connected:
                last_seen_s = now - last.at
                method = last.beat.method
                method_s = last.beat.method_s + last_seen_s if method else 0.0
                if last_seen_s > 2 * self.watch.interval_s + _SECOND:
                    state = "silent"
                elif method:
                    state = "busy"
            if failure is not None:
                state = "dead"
            reports.append(
                WorkerHealth(
                    rank,
                    worker.seat.slot.address,
                    worker.description.pid,
                    state,
                    method,
                    method_s,
                    last_seen_s,
                    self._state.num_restarts[rank],
                    failure,
                )
            )
        return reports

    def end_calls(self, actors: set[str], kind: FailureKind, cause: str) -> None:
        """End the workers that go on with a call that nobody wants any more."""
        for worker in list(self._workers):
            if worker.actor_id in actors:
                self.record(worker, kind, cause)

    @staticmethod
    def _in_thread(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="investigate", daemon=True).start()


def _released(worker: LaunchedWorker, cause: str) -> WorkerFailure:
    place = place_of(worker.actor_id)
    if place is None:
        description = worker.description
        return WorkerFailure(
            "", worker.seat.rank, "", description.pid, "released", cause=cause
        )
    return place.failed("released", cause)
