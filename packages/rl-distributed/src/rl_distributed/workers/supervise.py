"""`GroupSupervisor`: diagnose failures of a group's workers and restart them.

```
GroupWatch ---event---> investigate (a thread of its own)
NodeWatch  ---lost----> the same
a wait for results ---error---> explain
   both: record the failure, end what is left of the process, release those that wait
the next wait or call (its own thread): recover = find room, restart, on_restart, go on
```
`incidents` holds what has failed, `explain` finds the first of several failures.
Nothing here runs while all is well.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rl_distributed.cluster.watch import find_loss, raise_if_lost
from rl_distributed.errors import (
    DeadlineExceededError,
    DistributedError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from rl_distributed.failures.worker import (
    FailureKind,
    WorkerFailure,
    WorkerHealth,
    WorkerState,
)
from rl_distributed.security.audit import audited
from rl_distributed.workers.explain import FailureExplainer, cause_of_loss
from rl_distributed.workers.failures import failure_error, is_vague
from rl_distributed.workers.group_watch import GroupWatch, WatchEvent
from rl_distributed.workers.incidents import ASK_S, END_S, Incident, IncidentLog
from rl_distributed.workers.launch import LaunchedWorker, WorkerLauncher
from rl_distributed.workers.node_watch import NodeWatch, places_of
from rl_distributed.workers.policy import FailurePolicy, Restart
from rl_distributed.workers.processes import is_at_work, is_stopped, process_state
from rl_distributed.workers.room import NodeRoom

__all__ = ["GroupSupervisor", "open_supervisors"]

logger = logging.getLogger(__name__)

# How long Ray may take to tell how a process ended.
_CAUSE_S = 3.0
_SECOND = 1.0
# How much longer than its limit one may be silent that is seen to be at work.
_AT_WORK_S = 60.0
# How long after a worker the loss of its node is noticed.
_NODE_S = 2.0
_ROOM_LOOK_S = 0.5

# Of all groups of this process that are up, for a report of who waits for whom. Weak,
# like everything that refers to a group which may be dropped without a shutdown.
_open: weakref.WeakSet[GroupSupervisor] = weakref.WeakSet()
_open_lock = threading.Lock()


def open_supervisors() -> list[GroupSupervisor]:
    """Return the supervisors of all worker groups of this process, by name."""
    with _open_lock:
        found = list(_open)
    return sorted(found, key=lambda supervisor: supervisor.name)


class GroupSupervisor:
    """Supervises the workers of one group.

    Args:
        name: of the group, for messages.
        policy: what to do about failures.
        workers: by rank; restarted workers are put in their places.
        launcher: starts workers again.
        address: the address that the workers reach this process at.
        restore: called with the ranks that were started again; brings them to the state
            that they had.
    """

    def __init__(
        self,
        name: str,
        policy: FailurePolicy,
        workers: list[LaunchedWorker],
        launcher: WorkerLauncher,
        address: str,
        restore: Callable[[Sequence[int]], None],
    ) -> None:
        self.name = name
        self.policy = policy
        self._workers = workers
        self._launcher = launcher
        self._restore = restore
        # Reentrant: `on_restart` runs under it and calls the group, which asks for a
        # recovery first.
        self._recovery = threading.RLock()
        self._is_recovering = False
        self._restarts: list[float] = []
        self._next_look = 0.0
        self._given_up: DistributedError | None = None
        # A weak reference, so that the watch's thread does not keep an
        # unused group alive.
        notice = weakref.WeakMethod(self._notice)

        def on_event(event: WatchEvent) -> None:
            method = notice()
            if method is not None:
                method(event)

        self.watch = GroupWatch(name, address, policy.heartbeat_limit_s, on_event)
        lost = weakref.WeakMethod(self._lose_node)

        def on_lost(node_id: str, cause: str) -> None:
            method = lost()
            if method is not None:
                method(node_id, cause)

        self.nodes = NodeWatch(name, policy.node_limit_s, on_lost)
        self._own_node = ray.get_runtime_context().get_node_id()
        self._log = IncidentLog(workers, policy, self.watch)
        self.room = NodeRoom(name, policy, launcher, self._log)
        self._explainer = FailureExplainer(workers, policy, self._log)
        with _open_lock:
            _open.add(self)

    @property
    def incident(self) -> Incident | None:
        """The incident that is open; None: all workers are well."""
        return self._log.incident

    @property
    def gone(self) -> dict[int, WorkerFailure]:
        """Why the workers of these ranks are not up."""
        return dict(self._log.failed)

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
        far = {worker.seat.slot.node_id for worker in list(self._workers)}
        far.discard(self._own_node)
        if far:
            self.nodes.watch(places_of(far))

    def note_unplaced(self, workers: Sequence[LaunchedWorker]) -> None:
        """Enter workers that were not started, because no node has room for them."""
        for worker in workers:
            rank, address = worker.seat.rank, worker.seat.slot.address or "to come"
            cause = "no node has had room for it so far"
            failure = WorkerFailure(
                self.name, rank, address, None, "unplaced", cause=cause
            )
            self._log.note(worker, failure)

    def close(self) -> None:
        """Stop watching: workers that end from now on end on purpose."""
        with _open_lock:
            _open.discard(self)
        self._log.close()
        self.watch.close()
        self.nodes.close()

    # --- what has failed ----------------------------------------------------------

    def _notice(self, event: WatchEvent) -> None:
        """Look into an event; the watch's thread must not wait for anything."""
        self._investigate(self._look_into, event)

    def _lose_node(self, node_id: str, cause: str) -> None:
        """Note a lost node, in the thread of the watch of nodes."""
        self._investigate(self._log.record_lost_node, node_id, cause)

    def _investigate(self, look: Callable[..., None], *arguments: Any) -> None:
        if not self._log.is_closed:
            threading.Thread(
                target=self._look, args=(look, *arguments), name="look", daemon=True
            ).start()

    @staticmethod
    def _look(look: Callable[..., None], *arguments: Any) -> None:
        try:
            look(*arguments)
        except Exception:
            if ray.is_initialized():
                raise
            # Ray was shut down meanwhile, and the workers with it: no error to report.

    def _look_into(self, event: WatchEvent) -> None:
        workers = [
            self._workers[rank]
            for rank, incarnation in event.who
            # An event of a process that was replaced meanwhile says nothing of the one
            # that is there now.
            if rank < len(self._workers)
            and self._workers[rank].incarnation == incarnation
            and rank not in self._log.failed
        ]
        for worker in workers:
            if event.kind == "quiet":
                self._tell_of_quiet(worker, event.detail)
            elif event.kind in ("died", "lost"):
                loss = find_loss()
                cause = str(loss or "") or self._cause_of(
                    worker, certain=event.kind == "died"
                )
                if cause:
                    self._log.record(worker, "died", cause)
            elif event.kind == "late":
                self._log.record(worker, "late", event.detail)
            elif not self._gives_sign_of_life(worker):
                self._log.record(worker, "hung", event.detail + process_state(worker))

    def _gives_sign_of_life(self, worker: LaunchedWorker) -> bool:
        """Whether a silent worker was only starved of CPU or too busy to report.

        On a busy machine an import alone may hold the GIL for a long time.
        """
        end = time.monotonic() + _AT_WORK_S
        while not is_stopped(worker):
            if self._log.is_closed or self.watch.ask([worker.seat.rank], ASK_S):
                return True
            if time.monotonic() > end or not is_at_work(worker):
                return False
        return False

    def _tell_of_quiet(self, worker: LaunchedWorker, detail: str) -> None:
        """Warn early of what may become a failure at the heartbeat limit."""
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
        """Return how a process ended; empty if it may still run."""
        try:
            # Ray knows the exit code and whether memory ran out, but reports them only
            # in the error of a call.
            ray.get(worker.handle.answer.remote(), timeout=_CAUSE_S)
        except ray.exceptions.GetTimeoutError:
            return "its process has ended" if certain else ""
        except ray.exceptions.RayError as error:
            if worker.seat.slot.node_id != self._own_node and is_vague(error):
                # The watch of nodes learns the reason a moment later.
                rank = worker.seat.rank
                self._log.wait_for(lambda: self._log.failed.get(rank), _NODE_S)
            return cause_of_loss(worker, error)
        return ""

    # --- what a wait or a call asks -----------------------------------------------

    def check(self, ranks: Sequence[int], what: str) -> None:
        """Before a call in an incident: restart, or refuse what cannot run.

        Raises:
            WorkerError: a worker that the call needs has failed, and stays away.
        """
        can_shrink = self.policy.on_node_lost == "shrink"
        if self.policy.restarts:
            self.recover()
            if not can_shrink:
                return
        incident = self.incident
        if incident is not None and (gone := self._log.failed_among(ranks)):
            # Workers that can be done without do not take part in each other's ends.
            own = self._log.failed.get(gone[0], incident.root)
            raise failure_error(own if can_shrink else incident.root, what)

    # --- restarting ---------------------------------------------------------------

    def recover(self, *, is_patient: bool = True) -> None:
        """Restart what failed, if the policy says so and has tries left.

        Args:
            is_patient: wait for a node with room if there is none; otherwise leave the
                restart to a later caller that does.

        Raises:
            WorkerError: there were too many restarts, or the workers do not come up.
            ClusterLostError: Ray itself is lost, and can start nothing.
        """
        policy = self.policy
        if self.incident is None or not isinstance(policy, Restart):
            return
        with self._recovery:
            # Calls of `on_restart` come here as well, and find the workers up.
            if self._is_recovering:
                return
            if self._given_up is not None:
                raise self._given_up
            self._is_recovering = True
            try:
                while self.incident is not None and not self._log.is_closed:
                    raise_if_lost(at_once=True)
                    failed = self._log.failed_among()
                    if self.room.can_shrink:
                        if not self._placed(failed):
                            return
                    # A wait that is to raise the failure must not wait for a node
                    # instead; the next call will.
                    elif not is_patient and self.room.lacking(failed):
                        return
                    self._restart(policy, self.incident)
            finally:
                self._is_recovering = False

    def _placed(self, failed: Sequence[int]) -> list[int]:
        """Return those of these ranks that a node has room for now."""
        # Looked up now and then: each call comes here while a worker is missing.
        if time.monotonic() < self._next_look:
            return []
        lacking = self.room.lacking(failed)
        if len(lacking) == len(failed):
            self._next_look = time.monotonic() + _ROOM_LOOK_S
        return [rank for rank in failed if rank not in lacking]

    def restart(self, ranks: Sequence[int]) -> list[int]:
        """Start those of these workers again that have failed; others go on meanwhile.

        Returns:
            The ranks that were started again.

        Raises:
            WorkerStartError: one does not come up.
            DeadlineExceededError: not in time.
        """
        failed = self._log.failed_among(ranks)
        if failed:
            raise_if_lost(at_once=True)
            # Outside of the lock: others of the group can be restarted while this one
            # waits for a node.
            self.room.wait(failed)
        with self._recovery:
            failed = self._log.failed_among(ranks)
            if failed and not self._log.is_closed:
                self._put_in_place(self._relaunch(failed))
            return failed

    def _restart(self, policy: Restart, incident: Incident) -> None:
        pause_s = policy.pause_before(self._restarts)
        if pause_s is None:
            self._give_up(policy, incident)
        # Not a sleep, so that a shutdown ends the pause.
        self._log.stop.wait(pause_s)
        # Also those that are to be released along with the first.
        self._log.wait_for(
            lambda: not incident.open_releases, ASK_S + policy.release_after_s + END_S
        )
        ranks = self._ranks_to_restart(policy, incident)
        if self.room.can_shrink:
            ranks = self._placed(ranks)
        if not ranks:
            self._put_in_place([])
            return
        root = incident.root
        verb, why = "restarting", f"{root.label} {root.kind}"
        if root.kind == "unplaced":
            verb, why = "starting", "a node has room now"
        logger.warning("%s %s of group %r, because %s", verb, ranks, self.name, why)
        self.room.wait(ranks)
        # Counted before it is tried: a start that fails is a try as well.
        self._restarts.append(time.monotonic())
        try:
            fresh = self._relaunch(ranks)
        except (WorkerStartError, DeadlineExceededError) as error:
            logger.warning("restart of group %r failed: %s", self.name, error)
            if self.room.lacking(ranks):
                # Another node was lost meanwhile: that does not count.
                self._restarts.pop()
            return
        self._put_in_place(fresh)
        if policy.on_restart is None:
            return
        try:
            self._restore(ranks)
        except Exception as error:
            if self.incident is None:
                # No worker failed: it is the callback that cannot restore the state.
                self._given_up = WorkerError(
                    f"group {self.name!r} has no state after a restart, because "
                    f"on_restart raised {type(error).__name__}: {error}; shut it down"
                )
                # Open again, so that calls are refused: the workers are up, but without
                # their state.
                self._log.incident = incident
                raise

    def _ranks_to_restart(self, policy: Restart, incident: Incident) -> list[int]:
        if policy.ends_all():
            cause = f"its group is restarted after the failure of {incident.root.label}"
            others = self._log.note_released(list(self._workers), cause)
            self._log.end(others)
        return self._log.failed_among()

    def _relaunch(self, ranks: Sequence[int]) -> list[LaunchedWorker]:
        with audited("group.restart", self.name, ranks=list(ranks)):
            return self._launcher.launch(ranks)

    def _put_in_place(self, fresh: Sequence[LaunchedWorker]) -> None:
        if self._log.is_closed:
            # The group was shut down meanwhile.
            self._log.end(fresh)
            return
        self._log.put_in_place(fresh)
        self.expect(fresh)

    def _give_up(self, policy: Restart, incident: Incident) -> None:
        last = failure_error(incident.root, "after its last restart")
        error = WorkerDiedError(
            f"group {self.name!r} gives up after {policy.max_restarts} restarts within "
            f"{policy.within_s:g} s (max_restarts); the last failure: {last}"
        )
        error.failure = incident.root
        self._given_up = error
        raise error

    # --- how the workers are ------------------------------------------------------

    def explain(
        self,
        error: BaseException,
        what: str,
        references: Sequence[Any],
        method_name: str = "",
    ) -> DistributedError:
        """Return the error to raise in place of that of Ray; see `FailureExplainer`."""
        return self._explainer.explain(error, what, references, method_name)

    def failure_since(self, began: float) -> WorkerFailure | None:
        """Get the root of the incident that is open, if it began after a wait did."""
        incident = self.incident
        if incident is None or incident.at < began:
            return None
        return incident.root

    def failure_of(self, rank: int) -> WorkerFailure | None:
        """Return why this worker is away; None: it is not."""
        return self._log.failed.get(rank)

    def health(self) -> list[WorkerHealth]:
        """Return the state of each worker, by rank."""
        now = time.monotonic()
        seen = self.watch.seen()
        reports = []
        for rank, worker in enumerate(list(self._workers)):
            last = seen.get(rank)
            failure = self._log.failed.get(rank)
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
                    self._log.num_restarts[rank],
                    failure,
                )
            )
        return reports

    @property
    def workers(self) -> list[LaunchedWorker]:
        """The workers, by rank."""
        return list(self._workers)

    def end(self, ranks: Sequence[int], cause: str) -> None:
        """End workers that are up, and enter them as ended because of another."""
        workers = [self._workers[rank] for rank in ranks]
        self._log.end(self._log.note_released(workers, cause))

    def end_calls(self, actors: set[str], kind: FailureKind, cause: str) -> None:
        """End the workers that go on with a call that was cancelled."""
        for worker in list(self._workers):
            if worker.actor_id in actors:
                self._log.record(worker, kind, cause)
