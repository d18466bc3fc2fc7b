"""The replicas of a server: start, replacement of dead ones, and weight updates.

| part         | consumes          | produces      | waits for      | is unblocked by |
|--------------|-------------------|---------------|----------------|-----------------|
| one thread   | -                 | a process     | the process,   | its start,      |
| per replica  | reported losses   | that is up    | then its loss  | a loss, `stop`  |
| update       | folder, version   | a report      | all replicas   | its deadline    |

A replica that has started is published under the lock of updates, so it always has the
newest weights. One that fails an update is ended, and replaced by a process that loads
the weights of the last update that any replica loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_distributed.errors import ConfigError, DeadlineExceededError, DistributedError
from rl_models.errors import GenerationError
from rl_models.serving.folder_weights import FolderWeights

__all__ = ["Fleet", "Process", "UpdateReport"]

logger = logging.getLogger(__name__)

_HOUR_S = 3_600.0
_LAST_WAIT_S = 30.0


class Process(Protocol):
    """One process of a replica; its methods block, and raise DistributedError."""

    @property
    def pid(self) -> int | None:
        """Its number on this machine, once it is up."""
        ...

    def start(self) -> str:
        """Start it; return the URL of its server."""
        ...

    def load_weights(self, weights: FolderWeights, version: int) -> str:
        """Load weights; return the problem, or an empty string."""
        ...

    def stop(self, *, at_once: bool) -> None:
        """End it and all that it has started."""
        ...


@dataclass
class _Slot:
    """A replica and its present process; guarded by the fleet's lock."""

    replica: int
    state: str = "starting"
    url: str = ""
    process: Process | None = None
    version: int = 0
    num_restarts: int = 0
    problem: str = ""
    """Why the last process was lost."""
    restarts: list[float] = field(default_factory=list)
    lost: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class UpdateReport:
    """The result of a weight update."""

    version: int
    problems: dict[int, str]
    num_updated: int


class Fleet:
    """Keeps a number of replicas up.

    Args:
        launch: Makes the process of a replica, not started yet.
        num_replicas: Number of replicas.
        on_up: Called with number and URL of a replica that serves.
        on_down: Called with number and URL of one that must get no more requests.
        on_hopeless: Called once no replica is left and none will be started.
        max_restarts: Restarts of a replica within an hour before it is dropped.
    """

    def __init__(
        self,
        launch: Callable[[int], Process],
        num_replicas: int,
        *,
        on_up: Callable[[int, str], None],
        on_down: Callable[[int, str], None],
        on_hopeless: Callable[[], None],
        max_restarts: int = 3,
    ) -> None:
        self._launch = launch
        self._slots = [_Slot(number) for number in range(num_replicas)]
        self._on_up, self._on_down = on_up, on_down
        self._on_hopeless = on_hopeless
        self._max_restarts = max_restarts
        self._lock = threading.Lock()
        # Beside the lock of states: an update takes minutes, and states must be
        # readable meanwhile.
        self._updates = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._is_closed = False
        self._error: BaseException | None = None
        self._weights: tuple[FolderWeights, int] | None = None
        self._threads = [
            threading.Thread(
                target=self._keep_up,
                args=(slot,),
                name=f"replica-{slot.replica}",
                daemon=True,
            )
            for slot in self._slots
        ]

    @property
    def version(self) -> int:
        """The version of the newest weights; 0: those it was started with."""
        return 0 if self._weights is None else self._weights[1]

    def start(self, deadline_s: float) -> None:
        """Start all replicas.

        Raises:
            DistributedError: One does not start; all are ended then.
        """
        for thread in self._threads:
            thread.start()
        with self._settled:
            settled = self._settled.wait_for(
                lambda: (
                    self._error is not None
                    or all(slot.state == "up" for slot in self._slots)
                ),
                deadline_s,
            )
            error = self._error
        if error is None and not settled:
            error = DeadlineExceededError(
                f"{len(self._slots)} replicas did not come up within {deadline_s:g} s; "
                "raise start_deadline_s, or use fewer replicas"
            )
        if error is not None:
            self.stop()
            raise error

    def stop(self) -> None:
        """End all replicas; may be called more than once."""
        with self._lock:
            self._is_closed = True
            starting = [s.process for s in self._slots if s.state == "starting"]
            for slot in self._slots:
                slot.lost.set()
        for process in starting:
            # Its thread waits for the start and would not see the event above.
            if process is not None:
                process.stop(at_once=True)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_LAST_WAIT_S)

    def report_lost(self, replica: int, url: str, reason: str) -> None:
        """Have a process ended and replaced, if it is still the replica's."""
        # Reports may come late and several times; the URL tells processes apart.
        with self._lock:
            slot = self._slots[replica]
            if slot.url != url or slot.lost.is_set():
                return
            slot.problem = reason
            slot.lost.set()

    def status(self) -> dict[str, Any]:
        """State and version of every replica, as JSON values."""
        with self._lock:
            rows = [
                {
                    "replica": slot.replica,
                    "state": slot.state,
                    "pid": None if slot.process is None else slot.process.pid,
                    "weight_version": slot.version,
                    "restarts": slot.num_restarts,
                    "problem": slot.problem,
                }
                for slot in self._slots
            ]
        return {"weight_version": self.version, "replicas": rows}

    # --- one replica --------------------------------------------------------------

    def _keep_up(self, slot: _Slot) -> None:
        """Run process after process of a replica, until it is dropped."""
        while not self._is_closed:
            process = self._launch(slot.replica)
            with self._lock:
                slot.process = process
            try:
                self._publish(slot, process, process.start())
            except Exception as error:
                process.stop(at_once=True)
                if not self._may_try_again(slot, str(error), error):
                    return
                continue
            slot.lost.wait()
            # First, so that no new request goes to a process that is being ended.
            self._on_down(slot.replica, slot.url)
            with self._lock:
                slot.state, slot.url, slot.process = "ended", "", None
            process.stop(at_once=not self._is_closed)
            if not self._may_try_again(slot, slot.problem, None):
                return

    def _publish(self, slot: _Slot, process: Process, url: str) -> None:
        """Give a started process the newest weights, and then requests."""
        # No update may come in between, which would miss this replica.
        with self._updates:
            if self._weights is not None:
                weights, version = self._weights
                problem = process.load_weights(weights, version)
                if problem:
                    raise GenerationError(problem)
            with self._settled:
                slot.state, slot.url = "up", url
                slot.version = self.version
                slot.lost.clear()
                # `stop` may have set the event before it was cleared.
                if self._is_closed:
                    slot.lost.set()
                self._settled.notify_all()
            self._on_up(slot.replica, url)

    def _may_try_again(
        self, slot: _Slot, reason: str, error: BaseException | None
    ) -> bool:
        """Count a loss; False if the replica is dropped or the fleet is closed."""
        with self._settled:
            if self._is_closed:
                slot.state = "ended"
                return False
            slot.problem = reason
            if error is not None and slot.num_restarts == 0:
                # It has never started, so the cause is probably permanent.
                self._error = error
                self._settled.notify_all()
                slot.state = "dropped"
                return False
            now = time.monotonic()
            slot.restarts = [at for at in slot.restarts if now - at < _HOUR_S]
            slot.restarts.append(now)
            slot.num_restarts += 1
            dropped = len(slot.restarts) > self._max_restarts
            slot.state = "dropped" if dropped else "starting"
            hopeless = all(other.state == "dropped" for other in self._slots)
        if dropped:
            logger.error("replica %d is dropped: %s", slot.replica, reason)
        else:
            logger.warning("replica %d is replaced: %s", slot.replica, reason)
        if hopeless:
            self._on_hopeless()
        return not dropped

    # --- weights ------------------------------------------------------------------

    def update_weights(
        self, weights: FolderWeights, version: int | None = None
    ) -> UpdateReport:
        """Load other weights on all replicas that are up, at the same time.

        Requests wait meanwhile, and go on under the new weights.

        Args:
            weights: A model folder that was found to fit.
            version: Number of these weights in answers; None: one more than before.

        Raises:
            ConfigError: The version is not above the present one; nothing was changed.
            GenerationError: No replica is up.
        """
        with self._updates:
            return self._update(weights, self._next_version(version))

    def _next_version(self, version: int | None) -> int:
        if version is None:
            return self.version + 1
        if version <= self.version:
            raise ConfigError(
                f"version must be above the present one, {self.version}: got {version}"
            )
        return version

    def _update(self, weights: FolderWeights, version: int) -> UpdateReport:
        with self._lock:
            up = [slot for slot in self._slots if slot.state == "up"]
        if not up:
            raise GenerationError("no replica is up that could load weights")
        with ThreadPoolExecutor(len(up)) as pool:
            said = list(pool.map(lambda slot: _load(slot, weights, version), up))
        problems = {
            slot.replica: problem
            for slot, problem in zip(up, said, strict=True)
            if problem
        }
        # What one replica could load, its successors can as well.
        if len(problems) < len(up):
            self._weights = (weights, version)
        for slot in up:
            if slot.replica in problems:
                self._on_down(slot.replica, slot.url)
                self.report_lost(slot.replica, slot.url, problems[slot.replica])
            else:
                slot.version = version
        return UpdateReport(version, problems, len(up) - len(problems))


def _load(slot: _Slot, weights: FolderWeights, version: int) -> str:
    process = slot.process
    if process is None:
        return "it died before the update"
    try:
        return process.load_weights(weights, version)
    except DistributedError as error:
        return str(error)
