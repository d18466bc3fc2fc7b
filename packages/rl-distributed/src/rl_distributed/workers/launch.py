"""Bringing up the workers of a group, and ending their processes.

```
the environment is built and checked on each node -> start host processes -> each
imports the class -> (again, where the class or its configure_worker asks for another
process) -> all constructors at the same time -> ready
```
Constructors run at the same time because they may wait for each other, as those that
form a process group do.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray

from rl_distributed.actor_environments.declarations import (
    Declaration,
    checked_environment,
)
from rl_distributed.actor_environments.on_nodes import prepare_on_nodes
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerStartError,
)
from rl_distributed.logs.logging import current_logging_setup
from rl_distributed.redaction import is_secret_variable
from rl_distributed.secret_variables import secrets_of
from rl_distributed.workers.beat_sender import WatchTarget
from rl_distributed.workers.failures import WorkerPlace, remember_worker
from rl_distributed.workers.host import WorkerDescription, WorkerIdentity
from rl_distributed.workers.layout import WorkerSeat
from rl_distributed.workers.options import identity_variables
from rl_distributed.workers.wait import fetch
from rl_distributed.workers.worker_class import LaunchOverrides

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from rl_distributed.actor_environments import (
        ActorEnvironment,
        PreparedEnvironment,
    )
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_distributed.workers.builder import RayWorkerBuilder

__all__ = ["LaunchedWorker", "WorkerLauncher", "shared_argument"]

# An object of its own costs a round trip to the store; below about this length the
# bytes are cheaper.
_INLINE_LENGTH = 1_024


@dataclass(slots=True)
class LaunchedWorker:
    """One worker: up, gone, or still to come."""

    seat: WorkerSeat
    actor: ActorHandle | None
    """None: it has not been started, for no node has had room for it so far."""
    description: WorkerDescription
    process: psutil.Process | None
    """The process where it is on this machine."""
    incarnation: int = 0
    """Number of processes that this rank has had before."""

    @classmethod
    def to_come(cls, seat: WorkerSeat, peer: LaunchedWorker) -> LaunchedWorker:
        """Return the stand-in for a worker that waits for a node.

        Args:
            seat: of the worker.
            peer: a worker of the same class that is up.
        """
        description = dataclasses.replace(peer.description, pid=0, log_path="")
        return cls(seat, None, description, None, incarnation=-1)

    @property
    def handle(self) -> ActorHandle:
        """The actor.

        Raises:
            WorkerDiedError: It has not been started.
        """
        if self.actor is None:
            raise WorkerDiedError(
                f"worker {self.seat.rank} waits for a node with room, and was not "
                "started so far"
            )
        return self.actor

    @property
    def actor_id(self) -> str:
        """Ray's id of the actor; empty if it has not been started."""
        return "" if self.actor is None else str(self.actor._actor_id.hex())


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
        seats: list[WorkerSeat],
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
        self._group_id = uuid.uuid4().hex
        self._env_vars = env_vars
        self._deadline_s = deadline_s
        self._placement_groups = cluster.get_placement_groups()
        self._share = cluster.worker_share
        self.watch_target: Callable[[int, int], WatchTarget] | None = None
        """Where the worker of a rank and incarnation sends its signs of life."""
        self._handles: dict[int, ActorHandle] = {}
        # The first start makes it 0.
        self._incarnations = dict.fromkeys(range(len(seats)), -1)
        self._rendezvous: tuple[str, int] | None = None
        self._own_node = ray.get_runtime_context().get_node_id()
        self._declaration = builder.declaration()
        self._prepared: Mapping[str, PreparedEnvironment] = {}

    @property
    def is_local(self) -> bool:
        """Whether all workers are on the node of this process."""
        return all(seat.slot.node_id == self._own_node for seat in self._seats)

    def launch(self, ranks: Sequence[int] | None = None) -> list[LaunchedWorker]:
        """Start the processes, load the class and make the workers.

        Args:
            ranks: which workers; None: all. They get a new MASTER_PORT if these are all
                of the group, and the one of the others if not.

        Returns:
            These workers, in the order of `ranks`.

        Raises:
            WorkerStartError: a worker did not come up; the others are ended.
            ActorEnvironmentError: a node cannot have the environment of the class; that
                is known before any process is started, and building it does not count
                as starting.
            UserError: the class or its constructor raised it.
        """
        ranks = range(len(self._seats)) if ranks is None else list(ranks)
        self._prepare(self._declaration.environment, ranks)
        # After the environment is there: building it takes minutes, and has a deadline
        # of its own.
        end = time.monotonic() + self._deadline_s
        self._handles = {}
        try:
            identities = self._identities(ranks)
            for rank in ranks:
                self._handles[rank] = self._start(rank, identities[rank])
            descriptions = self._load(ranks, end)
            end = self._restart_where_asked(identities, descriptions, end)
            for rank in ranks:
                self._remember(rank, descriptions[rank])
            self._construct(descriptions, end)
        # Also on an interrupt: processes that belong to no group would be left behind.
        except BaseException:
            for handle in self._handles.values():
                ray.kill(handle, no_restart=True)
            raise
        return [
            LaunchedWorker(
                self._seats[rank],
                self._handles[rank],
                descriptions[rank],
                self._process(self._seats[rank], descriptions[rank]),
                self._incarnations[rank],
            )
            for rank in ranks
        ]

    @property
    def seats(self) -> Sequence[WorkerSeat]:
        """The seat of each worker, by rank, running or about to start."""
        return self._seats

    def find_seats(self, ranks: Sequence[int]) -> list[int]:
        """Look up on which nodes the bundles of these workers are now.

        Returns:
            The ranks whose bundle waits for a node with room, as after a loss.
        """
        slots = self._cluster.find_bundles()
        waiting = []
        for rank in ranks:
            slot = slots[self._seats[rank].bundle]
            if slot.node_id:
                self._seats[rank] = dataclasses.replace(self._seats[rank], slot=slot)
            else:
                waiting.append(rank)
        return waiting

    def _prepare(self, environment: ActorEnvironment, ranks: Sequence[int]) -> None:
        """Make the environment ready on the nodes of these workers."""
        nodes = {self._seats[rank].slot.node_id for rank in ranks}
        self._prepared = prepare_on_nodes(environment, nodes)

    def _identities(self, ranks: Sequence[int]) -> dict[int, WorkerIdentity]:
        # A whole group meets at a new port, as the old one may be taken by now; a
        # worker that comes back must meet the others where they are.
        if self._rendezvous is None or len(ranks) == len(self._seats):
            first = self._seats[ranks[0]]
            self._rendezvous = self._cluster.get_available_address_and_port(
                *first.bundle
            )
        address, port = self._rendezvous
        threads = self._builder.options.thread_variables()
        given = {**self._builder.options.env_vars, **self._env_vars}
        secret = secrets_of(given)
        return {
            seat.rank: WorkerIdentity(
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
                logging=current_logging_setup(),
                group_id=self._group_id,
            )
            .without_variables(given)
            .with_variables(secret)
            for seat in (self._seats[rank] for rank in ranks)
        }

    def _start(
        self,
        rank: int,
        identity: WorkerIdentity,
        overrides: LaunchOverrides | None = None,
    ) -> ActorHandle:
        seat = self._seats[rank]
        self._incarnations[rank] += 1
        if self.watch_target is not None:
            target = self.watch_target(rank, self._incarnations[rank])
            identity = dataclasses.replace(identity, watch=target)
        # Ray writes runtime environments to its logs; secrets go with the identity.
        plain = {k: v for k, v in self._env_vars.items() if not is_secret_variable(k)}
        handle = self._builder(
            self._placement_groups[seat.slot.placement_group_index],
            seat.slot.bundle_index,
            self._share,
            identity,
            env_vars=plain,
            overrides=overrides,
            prepared=self._prepared[seat.slot.node_id],
        )
        self._handles[rank] = handle
        # Registered before it reports, so that errors during its start can name it.
        self._remember(rank, None)
        return handle

    def _load(
        self, ranks: Sequence[int], end: float, configure: bool = True
    ) -> dict[int, WorkerDescription]:
        references = []
        for rank in ranks:
            leads = self._seats[rank].leads_with
            arguments = {
                "num_gpus": self._share.num_gpus,
                "bundle_indices": None if leads is None else (leads[0], list(leads[1])),
                "num_gpus_per_node": self._cluster.num_gpus_per_node,
            }
            references.append(
                self._handles[rank].load.remote(
                    self._builder.portable_class(),
                    arguments if configure else None,
                    self._builder.search_path(self._declaration.environment),
                )
            )
        loaded = self._await(references, "its class to be imported", end)
        return dict(zip(ranks, loaded, strict=True))

    def _restart_where_asked(
        self,
        identities: Mapping[int, WorkerIdentity],
        descriptions: dict[int, WorkerDescription],
        end: float,
    ) -> float:
        """Replace the processes that the class wants to be made otherwise.

        Returns:
            `end`, later by the time that its environment took to be built.
        """
        moved = self._move_to_own_environment(descriptions)
        end += moved
        again = [
            rank
            for rank, description in descriptions.items()
            if description.overrides.need_new_process or moved
        ]
        if not again:
            return end
        for rank in again:
            overrides = descriptions[rank].overrides
            # A process is made with its environment and resources; they cannot be
            # changed afterwards.
            ray.kill(self._handles[rank], no_restart=True)
            variables = overrides.env_vars
            secret = secrets_of(variables)
            identity = identities[rank].without_variables(variables)
            self._start(rank, identity.with_variables(secret), overrides)
        # Not asked again: this process was made according to its answer.
        for rank, fresh in self._load(again, end, configure=False).items():
            descriptions[rank] = dataclasses.replace(
                fresh, overrides=descriptions[rank].overrides
            )
        return end

    def _move_to_own_environment(
        self, descriptions: Mapping[int, WorkerDescription]
    ) -> float:
        """Prepare the environment that the class itself declares, if nothing else did.

        The declaration of a class that is named by its path is known only once a worker
        has imported it. Returns the seconds this took; 0.0 where it declares none.
        """
        told = next(iter(descriptions.values())).environment
        if self._declaration.source != "default" or told is None:
            return 0.0
        start = time.monotonic()
        environment = checked_environment(told, self._builder.class_name)
        self._prepare(environment, list(descriptions))
        self._declaration = Declaration(environment, "class")
        # Above zero even where nothing had to be built, as that means that workers
        # move.
        return max(time.monotonic() - start, 1e-9)

    def _construct(
        self, descriptions: Mapping[int, WorkerDescription], end: float
    ) -> None:
        # One worker gets its arguments in the call; several would each get a copy of
        # them.
        many = len(descriptions) > 1
        share: Callable[[Any], Any] = shared_argument if many else lambda value: value
        args = [share(value) for value in self._builder.args]
        kwargs = {name: share(value) for name, value in self._builder.kwargs.items()}
        references = [
            self._handles[rank].construct.remote(
                *args, **{**kwargs, **description.overrides.init_kwargs}
            )
            for rank, description in descriptions.items()
        ]
        self._await(references, "its constructor", end)

    def _await(self, references: Sequence[Any], stage: str, end: float) -> list[Any]:
        what = f"starting {self._builder.class_name}, waiting for {stage}"
        try:
            # `Wait` rejects a deadline of zero; too late must end as a timeout instead.
            return fetch(references, what, max(0.001, end - time.monotonic()))
        except DeadlineExceededError as error:
            raise WorkerStartError(
                f"group {self._group!r} did not come up in start_deadline_s "
                f"({self._deadline_s:g} s): {error}"
            ) from None
        except WorkerDiedError as error:
            failed = WorkerStartError(str(error))
            failed.failure = error.failure
            raise failed from None

    def _remember(self, rank: int, description: WorkerDescription | None) -> None:
        given = {**self._builder.options.env_vars, **self._env_vars}
        remember_worker(
            self._handles[rank]._actor_id.hex(),
            WorkerPlace(
                self._group,
                rank,
                self._seats[rank].slot.address,
                None if description is None else description.pid,
                "" if description is None else description.log_path,
                secrets_of(given),
            ),
        )

    def _process(
        self, seat: WorkerSeat, description: WorkerDescription
    ) -> psutil.Process | None:
        if seat.slot.node_id != self._own_node:
            return None
        try:
            return psutil.Process(description.pid)
        # It has ended since it answered; the watch reports how.
        except psutil.NoSuchProcess:
            return None
