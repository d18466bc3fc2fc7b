"""Which replicas of a generator serve; lost ones are started again beside the others.

A replica is lost when its process is gone, gives no sign of life, or is past the
deadline of a call. A thread brings it back: new process, model, and where the weights
are still those of the model's folder, it serves at once. Else it serves from the next
weight update on, which comes early where nobody else is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from rl_distributed.errors import DistributedError
from rl_distributed.logging import get_logger
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.errors import GenerationError

__all__ = ["Replicas"]

_logger = get_logger(__name__)

_LOOK_S = 0.5


class Replicas:
    """The state of each replica, by rank.

    Args:
        group: Their workers.
        revive: Makes a replica of a new process; called with its rank, in a thread.
            True if it has the weights that are served.
        max_restarts: Restarts of all replicas together; later ones stay away.
        deadline_s: How long one restart may take.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        revive: Callable[[int], bool],
        *,
        max_restarts: int,
        deadline_s: float,
    ) -> None:
        self._group = group
        self._revive = revive
        self._left = max_restarts
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._serving = set(range(group.world_size))
        self._waiting: set[int] = set()
        self._reviving: dict[int, float] = {}
        self._away: dict[int, str] = {}
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
        """Replicas that were given up."""
        with self._changed:
            return len(self._away)

    def lose(self, rank: int, cause: BaseException) -> None:
        """Note a loss and begin to bring the replica back, if there are tries left."""
        with self._changed:
            if self._is_closed or rank not in self._serving | self._waiting:
                return
            self._serving.discard(rank)
            self._waiting.discard(rank)
            first = str(cause).strip().splitlines()[0]
            if self._left <= 0:
                self._away[rank] = first
                _logger.warning(
                    "generation replica %d is lost and stays away, because "
                    "generation.max_restarts is used up: %s",
                    rank,
                    first,
                )
            else:
                self._left -= 1
                self._reviving[rank] = time.monotonic()
                _logger.warning(
                    "generation replica %d is lost and started again: %s", rank, first
                )
                threading.Thread(
                    target=self._bring_back, args=(rank,), name="revive", daemon=True
                ).start()
            self._changed.notify_all()

    def _bring_back(self, rank: int) -> None:
        began = time.monotonic()
        problem = ""
        serves = False
        num_updates = self._num_updates
        try:
            self._group.restart([rank])
            serves = self._revive(rank)
        except DistributedError as error:
            problem = str(error).strip().splitlines()[0]
        except Exception as error:
            # Whatever it is, it must not leave others waiting for this replica.
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            self._reviving.pop(rank, None)
            if problem:
                self._away[rank] = f"it could not be started again: {problem}"
                _logger.warning("generation replica %d stays away: %s", rank, problem)
            else:
                is_current = serves and num_updates == self._num_updates
                (self._serving if is_current else self._waiting).add(rank)
                _logger.info(
                    "generation replica %d is back after %.1f s",
                    rank,
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

    def updated(self, ranks: Collection[int]) -> None:
        """These replicas have the weights that are served from now on, no others."""
        with self._changed:
            self._num_updates += 1
            live = self._serving | self._waiting
            self._serving = live & set(ranks)
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
