"""Bringing up the workers of a group, and ending their processes.

```
start host processes -> each imports the class -> (again, where configure_worker asks
for another process) -> all constructors at the same time -> ready
```
Constructors run at the same time because they may wait for each other, as those that
form a process group do.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerStartError,
)
from rl_distributed.workers.failures import WorkerPlace, remember_worker
from rl_distributed.workers.future import fetch
from rl_distributed.workers.host import (
    LaunchOverrides,
    WorkerDescription,
    WorkerIdentity,
)
from rl_distributed.workers.layout import WorkerSeat
from rl_distributed.workers.options import identity_variables

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from rl_distributed.virtual_cluster import RayVirtualCluster
    from rl_distributed.workers.builder import RayWorkerBuilder

__all__ = ["LaunchedWorker", "WorkerLauncher", "end_processes", "shared_argument"]

logger = logging.getLogger(__name__)

_KILL_GRACE_S = 5.0
_INLINE_LENGTH = 1_024


@dataclass(slots=True)
class LaunchedWorker:
    """One worker that is up."""

    seat: WorkerSeat
    handle: ActorHandle
    description: WorkerDescription
    process: psutil.Process | None
    """The process where it is on this machine."""


def shared_argument(value: Any) -> Any:
    """Put an argument of several calls in the object store once.

    References pass as they are, and small plain values are cheaper inside each call.
    """
    if isinstance(value, ray.ObjectRef) or value is None:
        return value
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | bytes) and len(value) <= _INLINE_LENGTH:
        return value
    return ray.put(value)


class WorkerLauncher:
    """Brings up the workers of one group; all or none of them."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        seats: Sequence[WorkerSeat],
        group: str,
        env_vars: Mapping[str, str],
        deadline_s: float,
    ) -> None:
        if deadline_s <= 0:
            raise ConfigError(f"start_deadline_s must be positive: got {deadline_s}")
        self._cluster = cluster
        self._builder = builder
        self._seats = seats
        self._group = group
        self._env_vars = env_vars
        self._deadline_s = deadline_s
        self._placement_groups = cluster.get_placement_groups()
        self._share = cluster.worker_share
        self._handles: list[ActorHandle] = []
        self._own_node = ray.get_runtime_context().get_node_id()

    def launch(self) -> list[LaunchedWorker]:
        """Start the processes, load the class and make the workers.

        Raises:
            WorkerStartError: a worker did not come up; the others are ended.
            UserError: the class or its constructor raised it.
        """
        if all(seat.slot.node_id == self._own_node for seat in self._seats):
            self._builder.check_interpreter()
        end = time.monotonic() + self._deadline_s
        identities = self._identities()
        try:
            self._handles = [
                self._start(seat, identity)
                for seat, identity in zip(self._seats, identities, strict=True)
            ]
            descriptions = self._load(list(range(len(self._seats))), end)
            descriptions = self._restart_where_asked(identities, descriptions, end)
            self._note_places(identities, descriptions)
            self._construct(descriptions, end)
        except BaseException:
            for handle in self._handles:
                ray.kill(handle, no_restart=True)
            raise
        return [
            LaunchedWorker(seat, handle, description, self._process(seat, description))
            for seat, handle, description in zip(
                self._seats, self._handles, descriptions, strict=True
            )
        ]

    def _identities(self) -> list[WorkerIdentity]:
        first = self._seats[0]
        address, port = self._cluster.get_available_address_and_port(*first.bundle)
        threads = self._builder.options.thread_variables()
        given = {**self._builder.options.env_vars, **self._env_vars}
        return [
            WorkerIdentity(
                self._group,
                seat.rank,
                seat.slot.address,
                identity_variables(
                    rank=seat.rank,
                    local_rank=seat.local_rank,
                    node_rank=seat.node_rank,
                    world_size=len(self._seats),
                    master_address=address,
                    master_port=port,
                )
                | threads,
            ).without_variables(given)
            for seat in self._seats
        ]

    def _start(
        self,
        seat: WorkerSeat,
        identity: WorkerIdentity,
        overrides: LaunchOverrides | None = None,
    ) -> ActorHandle:
        handle = self._builder(
            self._placement_groups[seat.slot.placement_group_index],
            seat.slot.bundle_index,
            self._share,
            identity,
            env_vars=self._env_vars,
            overrides=overrides,
        )
        self._remember(handle, identity, None)
        return handle

    def _load(
        self, positions: Sequence[int], end: float, configure: bool = True
    ) -> list[WorkerDescription]:
        references = []
        for position in positions:
            seat = self._seats[position]
            leads = seat.leads_with
            arguments = {
                "num_gpus": self._share.num_gpus,
                "bundle_indices": None if leads is None else (leads[0], list(leads[1])),
                "num_gpus_per_node": self._cluster.num_gpus_per_node,
            }
            references.append(
                self._handles[position].load.remote(
                    self._builder.worker_class,
                    arguments if configure else None,
                    self._builder.search_path(),
                )
            )
        return self._await(references, "its class to be imported", end)

    def _restart_where_asked(
        self,
        identities: Sequence[WorkerIdentity],
        descriptions: list[WorkerDescription],
        end: float,
    ) -> list[WorkerDescription]:
        again = [
            position
            for position, description in enumerate(descriptions)
            if description.overrides.need_new_process
        ]
        if not again:
            return descriptions
        for position in again:
            overrides = descriptions[position].overrides
            ray.kill(self._handles[position], no_restart=True)
            self._handles[position] = self._start(
                self._seats[position],
                identities[position].without_variables(overrides.env_vars),
                overrides,
            )
        reloaded = self._load(again, end, configure=False)
        merged = list(descriptions)
        for position, fresh in zip(again, reloaded, strict=True):
            merged[position] = dataclasses.replace(
                fresh, overrides=descriptions[position].overrides
            )
        return merged

    def _construct(self, descriptions: Sequence[WorkerDescription], end: float) -> None:
        many = len(self._handles) > 1
        share: Callable[[Any], Any] = shared_argument if many else lambda value: value
        args = [share(value) for value in self._builder.args]
        kwargs = {name: share(value) for name, value in self._builder.kwargs.items()}
        references = [
            handle.construct.remote(
                *args, **{**kwargs, **description.overrides.init_kwargs}
            )
            for handle, description in zip(self._handles, descriptions, strict=True)
        ]
        self._await(references, "its constructor", end)

    def _await(self, references: Sequence[Any], stage: str, end: float) -> list[Any]:
        what = f"starting {self._builder.class_name}, waiting for {stage}"
        try:
            return fetch(references, what, max(0.001, end - time.monotonic()))
        except DeadlineExceededError as error:
            raise WorkerStartError(
                f"group {self._group!r} did not come up in start_deadline_s "
                f"({self._deadline_s:g} s): {error}"
            ) from None
        except WorkerDiedError as error:
            raise WorkerStartError(str(error)) from None

    def _note_places(
        self,
        identities: Sequence[WorkerIdentity],
        descriptions: Sequence[WorkerDescription],
    ) -> None:
        for handle, identity, description in zip(
            self._handles, identities, descriptions, strict=True
        ):
            self._remember(handle, identity, description)

    @staticmethod
    def _remember(
        handle: ActorHandle,
        identity: WorkerIdentity,
        description: WorkerDescription | None,
    ) -> None:
        remember_worker(
            handle._actor_id.hex(),
            WorkerPlace(
                identity.label,
                identity.address,
                None if description is None else description.pid,
                "" if description is None else description.log_path,
            ),
        )

    def _process(
        self, seat: WorkerSeat, description: WorkerDescription
    ) -> psutil.Process | None:
        if seat.slot.node_id != self._own_node:
            return None
        try:
            return psutil.Process(description.pid)
        except psutil.NoSuchProcess:
            return None


def end_processes(workers: Sequence[LaunchedWorker], timeout_s: float) -> bool:
    """Kill workers and what they started; wait until those on this machine are gone."""
    own: list[psutil.Process] = []
    started: list[psutil.Process] = []
    for worker in workers:
        if worker.process is not None and worker.process.is_running():
            own.append(worker.process)
            started += _children(worker.process)
    if ray.is_initialized():
        for worker in workers:
            ray.kill(worker.handle, no_restart=True)
    grace = min(timeout_s, _KILL_GRACE_S)
    stubborn = _still_there(own, grace)
    for process in stubborn:
        logger.warning("worker process %d does not end; killing it", process.pid)
    for process in (*stubborn, *started):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return not _still_there([*stubborn, *started], grace)


def _still_there(
    processes: Sequence[psutil.Process], timeout_s: float
) -> list[psutil.Process]:
    """Wait for processes to end; returns those that did not."""
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    while (alive := [p for p in processes if _is_alive(p)]) and time.monotonic() < end:
        pause.wait(0.01)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    # A zombie has ended; its parent may be slow to notice.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
