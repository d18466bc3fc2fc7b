"""Which replicas of a generator serve; lost ones are started again beside the others.

A replica is lost when a process of it is gone, gives no sign of life, or is past the
deadline of a call. A thread brings it back: new processes, model, and where the weights
are still those of the model's folder, it serves at once. Else it serves from the next
weight update on, which comes early where nobody else is left.
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


class Replicas:
    """The state of each replica, by number.

    Args:
        workers: What they consist of.
        revive: Makes a replica of new processes; called with its number, in a thread.
            True if it has the weights that are served.
        max_restarts: Restarts of all replicas together; later ones stay away.
        deadline_s: How long one restart may take.
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
        self._changed = threading.Condition()
        self._serving = set(range(workers.num_replicas))
        self._waiting: set[int] = set()
        self._reviving: dict[int, float] = {}
        self._away: dict[int, str] = {}
        self._retired: set[int] = set()
        self._num_updates = 0
        self._is_closed = False

    @property
    def serving(self) -> list[int]:
        """Replicas that have the weights which are served."""
        with self._changed:
            return sorted(self._serving)

    @property
    def live(self) -> list[int]:
        """Replicas that have a model, whatever its weights."""
        with self._changed:
            return sorted(self._serving | self._waiting)

    @property
    def num_away(self) -> int:
        """Replicas that were given up, or are not wanted."""
        with self._changed:
            return len(self._away) + len(self._retired)

    def resize(self, wanted: int) -> None:
        """Have another number of replicas serve, at most as many as there are workers.

        Nothing may be generated meanwhile. Those that are too many are ended; more come
        back, or are tried again where they were given up, and wait for weights.

        Args:
            wanted: How many.

        Raises:
            GenerationError: None is left to go on with.
            WorkerStartError: One did not come up; the number is what it was.
        """
        live = self.settle()
        if wanted <= len(live):
            for replica in live[wanted:]:
                self._retire(replica)
            return
        with self._changed:
            spare = [*sorted(self._retired), *sorted(self._away)]
        added: list[int] = []
        try:
            for replica in spare[: wanted - len(live)]:
                added.append(replica)
                self._add(replica)
        except BaseException:
            # All or none: the number is what it was.
            for replica in added:
                self._retire(replica)
            raise

    def _retire(self, replica: int) -> None:
        with self._changed:
            self._serving.discard(replica)
            self._waiting.discard(replica)
            self._away.pop(replica, None)
            self._retired.add(replica)
            self._changed.notify_all()
        self._workers.end(replica, "generation.num_replicas was lowered")

    def _add(self, replica: int) -> None:
        num_updates = self._num_updates
        # Weights that arrive while it starts are newer than what it reads; the count
        # tells.
        self._workers.restart(replica, "generation.num_replicas was raised")
        serves = self._revive(replica)
        with self._changed:
            self._retired.discard(replica)
            self._away.pop(replica, None)
            is_current = serves and num_updates == self._num_updates
            (self._serving if is_current else self._waiting).add(replica)
            self._changed.notify_all()

    def lose(self, replica: int, cause: BaseException) -> None:
        """Note a loss and begin to bring the replica back, if there are tries left."""
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
            # In a thread, as a start takes seconds in which the other replicas go on.
            threading.Thread(
                target=work, args=(replica, first), name="revive", daemon=True
            ).start()
            self._changed.notify_all()

    def _bring_back(self, replica: int, cause: str) -> None:
        began = time.monotonic()
        problem = ""
        serves = False
        num_updates = self._num_updates
        try:
            self._workers.restart(replica, cause)
            serves = self._revive(replica)
        except DistributedError as error:
            problem = str(error).strip().splitlines()[0]
        except Exception as error:
            # Whatever it is, it must not leave others waiting for this replica.
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            # In one step with the new state, so that no waiter sees the replica
            # nowhere.
            self._reviving.pop(replica, None)
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

    def settle(self) -> list[int]:
        """Wait until nobody is being started; the live replicas.

        Raises:
            GenerationError: There is none.
        """
        self._wait(lambda: not self._reviving)
        live = self.live
        if not live:
            raise GenerationError(self._nobody())
        return live

    def wait_for_one(self) -> Sequence[int]:
        """Wait until some replica is live; the serving ones, or none if all wait.

        Raises:
            GenerationError: None is live, and none is being started.
        """
        self._wait(lambda: bool(self._serving or self._waiting or not self._reviving))
        if not self.live:
            raise GenerationError(self._nobody())
        return self.serving

    def _wait(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + self._deadline_s
        with self._changed:
            while not holds() and time.monotonic() < end:
                self._changed.wait(_LOOK_S)

    def updated(self, replicas: Collection[int]) -> None:
        """Serve from these replicas only: they have the weights."""
        with self._changed:
            self._num_updates += 1
            live = self._serving | self._waiting
            self._serving = live & set(replicas)
            # Those that came back meanwhile have older weights: they wait for the next
            # update.
            self._waiting = live - self._serving
            self._changed.notify_all()

    def close(self) -> None:
        """Bring nobody back any more."""
        with self._changed:
            self._is_closed = True

    def _nobody(self) -> str:
        with self._changed:
            reasons = [f"replica {r}: {why}" for r, why in sorted(self._away.items())]
            reasons += [f"replica {r}: is being started" for r in self._reviving]
        return (
            "No generation replica is left: "
            + "; ".join(reasons)
            + ". Raise generation.max_restarts, or resume the run from its checkpoint."
        )
