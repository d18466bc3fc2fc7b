"""The state of a generator's replicas; lost ones are restarted while others serve.

A replica is lost when one of its processes is gone, gives no sign of life, or exceeds
the deadline of a call. A thread restarts it with new processes and the model. If the
weights are still those of the model's folder, it serves at once; otherwise it serves
from the next weight update on, which comes early if no other replica is left.

A replica that no node has room for, because its node is lost or still to come, waits
for one in that thread. Callers do not wait for it unless no other is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from rl_distributed.errors import DistributedError
from rl_distributed.logs.logging import get_logger
from rl_models.errors import GenerationError
from rl_models.replicas.workers import ReplicaWorkers

__all__ = ["Replicas"]

_logger = get_logger(__name__)

_LOOK_S = 0.5
_LOWERED = "generation.num_replicas was lowered"


class Replicas:
    """The state of each replica, by number.

    Args:
        workers: Their workers.
        revive: Sets up the new processes of a replica; called with its number, in a
            thread. Returns whether it has the weights that are served.
        max_restarts: Number of restarts of all replicas together; replicas that are
            lost later stay away.
        deadline_s: How long one restart may take, with the wait for a node.
    """

    def __init__(
        self,
        workers: ReplicaWorkers,
        revive: Callable[[int], bool],
        *,
        max_restarts: int,
        deadline_s: float,
    ) -> None:
        self._workers = workers
        self._revive = revive
        self._left = max_restarts
        self._deadline_s = deadline_s
        # Callers of `generate`, weight updates and threads that restart replicas all
        # change the sets below.
        self._changed = threading.Condition()
        self._unplaced = set(workers.unplaced)
        self._serving = set(range(workers.num_replicas)) - self._unplaced
        self._waiting: set[int] = set()
        self._reviving: dict[int, float] = {}
        self._away: dict[int, str] = {}
        self._retired: set[int] = set()
        self._num_updates = 0
        self._is_closed = False

    @property
    def serving(self) -> list[int]:
        """Replicas that have the served weights."""
        with self._changed:
            return sorted(self._serving)

    @property
    def live(self) -> list[int]:
        """Replicas that have a model, whatever its weights."""
        with self._changed:
            return sorted(self._serving | self._waiting)

    @property
    def num_away(self) -> int:
        """Number of replicas that have no node, were given up, or are not wanted."""
        with self._changed:
            return len(self._unplaced) + len(self._away) + len(self._retired)

    def start_unplaced(self) -> None:
        """Start replicas that no node had room for, each when one has."""
        for replica in sorted(self._unplaced):
            self._in_thread(self._bring_back, replica, "its node was still to come")

    @staticmethod
    def _in_thread(work: Callable[[int, str], None], replica: int, cause: str) -> None:
        # In a thread, because a start takes seconds in which the others go on. A
        # daemon, because the program may end meanwhile.
        threading.Thread(
            target=work, args=(replica, cause), name="revive", daemon=True
        ).start()

    def resize(self, wanted: int) -> None:
        """Have another number of replicas serve, at most as many as there are workers.

        Nothing may be generated meanwhile. Surplus replicas are ended, those that wait
        for a node first; additional ones are restarted, also those that were given up,
        and wait for weights.

        Args:
            wanted: Number of replicas.

        Raises:
            GenerationError: None is left to go on with.
            WorkerStartError: One did not come up; the number is what it was.
        """
        # Under one lock, so that no node comes between the look and the choice.
        with self._changed:
            live = self.settle()
            # Those whose node is still to come are among the wanted ones.
            present = [*live, *sorted(self._unplaced)]
            spare = [*sorted(self._retired), *sorted(self._away)]
            for replica in present[wanted:]:
                self._forget(replica)
        for replica in present[wanted:]:
            self._workers.end(replica, _LOWERED)
        added: list[int] = []
        try:
            for replica in spare[: max(wanted - len(present), 0)]:
                added.append(replica)
                self._add(replica)
        except BaseException:
            # All or none: the number stays what it was.
            for replica in added:
                self._retire(replica)
            raise

    def _retire(self, replica: int) -> None:
        self._forget(replica)
        self._workers.end(replica, _LOWERED)

    def _forget(self, replica: int) -> None:
        """Have a replica count as one that is not wanted."""
        with self._changed:
            self._serving.discard(replica)
            self._waiting.discard(replica)
            self._unplaced.discard(replica)
            self._away.pop(replica, None)
            self._retired.add(replica)
            self._changed.notify_all()

    def _add(self, replica: int) -> None:
        num_updates = self._num_updates
        # Weights that arrive while it starts are newer than those it reads; comparing
        # the count shows that.
        self._workers.restart(replica, "generation.num_replicas was raised")
        serves = self._revive(replica)
        with self._changed:
            self._retired.discard(replica)
            self._away.pop(replica, None)
            is_current = serves and num_updates == self._num_updates
            (self._serving if is_current else self._waiting).add(replica)
            self._changed.notify_all()

    def lose(self, replica: int, cause: BaseException) -> None:
        """Record a loss and begin to restart the replica, if restarts are left."""
        with self._changed:
            # Several calls of one replica report the same loss; it is counted once.
            if self._is_closed or replica not in self._serving | self._waiting:
                return
            self._serving.discard(replica)
            self._waiting.discard(replica)
            first = str(cause).strip().splitlines()[0]
            work = self._workers.end
            if self._left <= 0:
                self._away[replica] = first
                _logger.warning(
                    "generation replica %d is lost and stays away, because "
                    "generation.max_restarts is used up: %s",
                    replica,
                    first,
                )
            else:
                self._left -= 1
                self._reviving[replica] = time.monotonic()
                work = self._bring_back
                _logger.warning(
                    "generation replica %d is lost and started again: %s",
                    replica,
                    first,
                )
            self._in_thread(work, replica, first)
            self._changed.notify_all()

    def _bring_back(self, replica: int, cause: str) -> None:
        problem = ""
        serves = False
        try:
            while self._await_nodes(replica):
                began, num_updates = time.monotonic(), self._num_updates
                try:
                    self._workers.restart(replica, cause)
                    serves = self._revive(replica)
                    break
                except DistributedError:
                    # Otherwise another node was lost while it started.
                    if not self._workers.lacks_node(replica):
                        raise
            else:
                return
        except DistributedError as error:
            problem = str(error).strip().splitlines()[0]
        except Exception as error:
            # Whatever it is, callers must not wait for this replica any longer.
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            # Under one lock with the new state, so that no waiter sees the replica in
            # no state at all.
            if not self._is_coming(replica):
                # It was retired while it waited for a node, and counts as that.
                return
            self._reviving.pop(replica, None)
            self._unplaced.discard(replica)
            if problem:
                self._away[replica] = f"it could not be started again: {problem}"
                _logger.warning(
                    "generation replica %d stays away: %s", replica, problem
                )
            else:
                is_current = serves and num_updates == self._num_updates
                (self._serving if is_current else self._waiting).add(replica)
                _logger.info(
                    "generation replica %d is back after %.1f s",
                    replica,
                    time.monotonic() - began,
                )
            self._changed.notify_all()

    def _await_nodes(self, replica: int) -> bool:
        """Wait until nodes have room for a replica; return whether it is wanted then.

        Raises:
            WorkerDiedError: None had in time.
        """
        if self._workers.lacks_node(replica):
            with self._changed:
                if not self._is_coming(replica):
                    return False
                self._reviving.pop(replica, None)
                self._unplaced.add(replica)
                self._changed.notify_all()
            self._workers.wait_for_nodes(replica)
        with self._changed:
            # One that was retired may even be back by now, started by `resize`.
            if self._is_closed or not self._is_coming(replica):
                return False
            # Callers that need all replicas wait for it from here on.
            self._unplaced.discard(replica)
            self._reviving.setdefault(replica, time.monotonic())
        return True

    def _is_coming(self, replica: int) -> bool:
        return replica in self._reviving or replica in self._unplaced

    def settle(self) -> list[int]:
        """Wait until no replica is being started; return the live ones.

        Raises:
            GenerationError: There is none.
        """
        self._wait(
            lambda: (
                not self._reviving
                and bool(self._serving or self._waiting or not self._unplaced)
            )
        )
        live = self.live
        if not live:
            raise GenerationError(self._nobody())
        return live

    def wait_for_one(self) -> Sequence[int]:
        """Wait until some replica is live; return the serving ones, if any.

        Raises:
            GenerationError: None is live, and none is being started.
        """
        self._wait(
            lambda: bool(
                self._serving or self._waiting or not (self._reviving or self._unplaced)
            )
        )
        if not self.live:
            raise GenerationError(self._nobody())
        return self.serving

    def _wait(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + self._deadline_s
        with self._changed:
            while not holds() and time.monotonic() < end:
                self._changed.wait(_LOOK_S)

    def updated(self, replicas: Collection[int]) -> None:
        """Serve from these replicas only, because they have the weights."""
        with self._changed:
            self._num_updates += 1
            live = self._serving | self._waiting
            self._serving = live & set(replicas)
            # Replicas that were restarted meanwhile have older weights, and wait for
            # the next update.
            self._waiting = live - self._serving
            self._changed.notify_all()

    def renew(self, max_restarts: int) -> None:
        """Allow this many restarts from now on, whatever was used before."""
        with self._changed:
            self._left = max_restarts

    def close(self) -> None:
        """Restart no more replicas."""
        with self._changed:
            self._is_closed = True

    def _nobody(self) -> str:
        with self._changed:
            reasons = [f"replica {r}: {why}" for r, why in sorted(self._away.items())]
            reasons += [f"replica {r}: is being started" for r in self._reviving]
            reasons += [f"replica {r}: waits for a node" for r in self._unplaced]
        return (
            "No generation replica is left: "
            + "; ".join(reasons)
            + ". Raise generation.max_restarts, or resume the run from its checkpoint."
        )
