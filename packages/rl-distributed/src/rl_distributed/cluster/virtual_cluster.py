"""`RayVirtualCluster`: a part of a Ray cluster, divided into equal worker slots.

The cluster is a list of nodes, each with a number of *bundles*; a worker group puts one
worker on a bundle, and several groups may share the bundles (colocation). One Ray
placement group holds the bundles of one node, so that they lie on the same machine;
or, on request, one holds the bundles of all nodes.

Whether the bundles fit is computed from the nodes' capacities first, because Ray would
wait forever. Bundles are ordered so that neighbours are near each other (`topology`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import remove_placement_group

from rl_distributed.cluster.config import (
    STRATEGIES,
    ClusterConfig,
    ClusterSize,
    PlacementStrategy,
    check_bundle_resources,
    check_min_nodes,
)
from rl_distributed.cluster.node_ports import ports_of_slots
from rl_distributed.cluster.placement import Bundle
from rl_distributed.cluster.ports import PortAllocator
from rl_distributed.cluster.reservation import (
    WorkerSlot,
    current_slots,
    reserve_bundles,
)
from rl_distributed.cluster.start import init_ray, live_nodes
from rl_distributed.cluster.tenants import Tenants
from rl_distributed.cluster.topology import split_into_groups
from rl_distributed.cluster.watch import find_loss
from rl_distributed.errors import ConfigError, DistributedError
from rl_distributed.process.closing import close_after
from rl_distributed.security.audit import audit, audited
from rl_distributed.security.tls_files import TlsFiles

if TYPE_CHECKING:
    from types import TracebackType

    from ray.util.placement_group import PlacementGroup

__all__ = [
    "RayVirtualCluster",
    "WorkerSlot",
    "init_ray",
]

_GROUPS = 2


class RayVirtualCluster:
    """Bundles on nodes of a Ray cluster, which worker groups share.

    Nothing is reserved before the first group (or `get_placement_groups`) asks for it;
    Ray is started locally then if it is not up.

    Args:
        bundle_ct_per_node_list: bundles per node: `[8, 8]` is two nodes with eight.
        use_gpus: one GPU per bundle; None: if the Ray cluster has GPUs.
        max_colocated_worker_groups: how many groups may share a bundle; each gets that
            fraction of it. With GPUs a bundle has as many CPUs. None: two groups, which
            share one CPU; 1 refuses a second group.
        num_gpus_per_node: most GPU bundles that one node may be asked for.
        name: name of the cluster in messages.
        placement_group_strategy: layout of a unified placement group over all nodes.
        port_range_low: first port to hand out; None: ports below the kernel's own.
        port_range_high: end (exclusive) of the ports to hand out.
        deadline_s: how long to wait for resources that are still in use elsewhere.
        unified: one placement group over all nodes instead of one for each, where
            `place` does not say otherwise.
        bundle_resources: further Ray resources of each bundle, by name. `CPU` replaces
            the CPUs that it has otherwise; 0 fits where all are taken.
        tls: as for `init_ray`, which is called where Ray is not up; for its other
            options, call it first.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool | None = None,
        max_colocated_worker_groups: int | None = None,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: PlacementStrategy = "SPREAD",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        *,
        deadline_s: float = 60.0,
        unified: bool = False,
        bundle_resources: Mapping[str, float] | None = None,
        tls: bool | TlsFiles = False,
    ) -> None:
        self._bundle_counts = list(bundle_ct_per_node_list)
        given = max_colocated_worker_groups
        self.max_colocated_worker_groups = _GROUPS if given is None else given
        self._cpus_beside_gpu = float(1 if given is None else given)
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name or "cluster"
        self.placement_group_strategy = placement_group_strategy
        self.deadline_s = deadline_s
        self._min_nodes: int | None = None
        self._nodes_deadline_s = 0.0
        self._bundle_resources = dict(bundle_resources or {})
        self._tls = tls
        self._pass_env: tuple[str, ...] = ()
        self._requested_gpus = use_gpus
        self._ports = PortAllocator(port_range_low, port_range_high)
        self._placement_groups: list[PlacementGroup] = []
        self._slots: list[list[WorkerSlot]] = []
        self._tenants = Tenants(self.name, self.max_colocated_worker_groups)
        # Reentrant, because `place` and `find_bundles` hold it while they
        # reserve bundles.
        self._lock = threading.RLock()
        self._closed = False
        self._is_unified = unified
        self._check_arguments()

    @classmethod
    def from_config(
        cls,
        config: ClusterSize,
        *,
        name: str = "",
        max_colocated_worker_groups: int | None = None,
    ) -> RayVirtualCluster:
        """Build the cluster that a section of a configuration describes.

        Args:
            config: its size; a `ClusterConfig` also says how to start Ray.
            name: as for the constructor.
            max_colocated_worker_groups: as for the constructor.
        """
        cluster = cls(
            [config.workers_per_node] * config.num_nodes,
            use_gpus=config.use_gpus,
            max_colocated_worker_groups=max_colocated_worker_groups,
            num_gpus_per_node=max(config.workers_per_node, 1),
            name=name,
            placement_group_strategy=config.placement_group_strategy,
            deadline_s=config.placement_deadline_s,
            unified=config.unified,
            bundle_resources=config.bundle_resources,
        )
        if isinstance(config, ClusterConfig):
            cluster._tls, cluster._pass_env = config.tls, tuple(config.pass_env)
        cluster._min_nodes = config.min_nodes
        cluster._nodes_deadline_s = config.nodes_deadline_s
        return cluster

    def _check_arguments(self) -> None:
        counts = self._bundle_counts
        if not counts or any(
            isinstance(count, bool) or not isinstance(count, int) or count < 1
            for count in counts
        ):
            raise ConfigError(
                "bundle_ct_per_node_list must hold a positive number of bundles for "
                f"each node, such as [2] or [8, 8]: got {counts}"
            )
        if self.max_colocated_worker_groups < 1:
            raise ConfigError(
                "max_colocated_worker_groups must be at least 1: got "
                f"{self.max_colocated_worker_groups}"
            )
        if self.placement_group_strategy not in STRATEGIES:
            raise ConfigError(
                f"placement_group_strategy must be one of {', '.join(STRATEGIES)}: "
                f"got {self.placement_group_strategy!r}"
            )
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s must be positive: got {self.deadline_s}")
        check_bundle_resources(self._bundle_resources, self._requested_gpus)
        if self._requested_gpus and max(counts) > self.num_gpus_per_node:
            raise ConfigError(
                "bundle_ct_per_node_list must not exceed num_gpus_per_node "
                f"({self.num_gpus_per_node}) where GPUs are used: got {counts}"
            )

    @property
    def bundle_counts(self) -> tuple[int, ...]:
        """Number of bundles on each node."""
        return tuple(self._bundle_counts)

    @property
    def use_gpus(self) -> bool:
        """Whether each bundle has a GPU; asks Ray where it was left open."""
        # Only when needed, so that a cluster can be described and checked without Ray.
        if self._requested_gpus is None:
            init_ray(tls=self._tls, pass_env=self._pass_env)
            self._requested_gpus = any(node.num_gpus >= 1 for node in live_nodes())
        return self._requested_gpus

    @property
    def bundle(self) -> Bundle:
        """Resources that one bundle reserves."""
        resources = dict(self._bundle_resources)
        resources.pop("CPU", None)
        return Bundle(self._cpus_per_bundle, float(self.use_gpus), resources)

    @property
    def _cpus_per_bundle(self) -> float:
        usual = self._cpus_beside_gpu if self.use_gpus else 1.0
        return self._bundle_resources.get("CPU", usual)

    @property
    def worker_share(self) -> Bundle:
        """Resources of one worker of one group, as its share of a bundle."""
        # Rounded down to what Ray can count, or the last group would not fit.
        share = (10_000 // self.max_colocated_worker_groups) / 10_000
        if not self.use_gpus:
            return Bundle(self._cpus_per_bundle * share)
        return Bundle(min(1.0, self._cpus_per_bundle * share), share)

    @property
    def is_shut_down(self) -> bool:
        """Whether the bundles were released; nothing runs on them then."""
        return self._closed

    def world_size(self) -> int:
        """Return the number of bundles on all nodes."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        """Return the number of nodes."""
        return len(self._bundle_counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the placement groups, one for each node; created at the first call."""
        self._init_placement_groups()
        return list(self._placement_groups)

    def slots(self) -> list[list[WorkerSlot]]:
        """Return the bundles of every placement group, each with its node."""
        self._init_placement_groups()
        return [list(slots) for slots in self._slots]

    def find_bundles(self) -> dict[tuple[int, int], WorkerSlot]:
        """Return where Ray has each (placement group, bundle) now.

        After the loss of a node its bundles move to others with room, or wait for one;
        the `node_id` of a waiting bundle is empty.

        Raises:
            DistributedError: the cluster was shut down.
        """
        with self._lock:
            self._init_placement_groups()
            found = current_slots(self._placement_groups, self._slots, live_nodes())
            # A waiting bundle keeps its last node here, as `slots` promises one for
            # each.
            self._slots = [
                [new if new.node_id else old for new, old in zip(*rows, strict=True)]
                for rows in zip(found, self._slots, strict=True)
            ]
            return _by_bundle(found)

    def place(
        self,
        *,
        unified: bool | None = None,
        strategy: PlacementStrategy | None = None,
        min_nodes: int | None = None,
        nodes_deadline_s: float | None = None,
    ) -> None:
        """Reserve the bundles now instead of when they are first needed.

        Args:
            unified: one placement group over all nodes instead of one for each: for
                engines that start their own Ray workers on several nodes, and for tied
                groups that span nodes. None: as given to the constructor.
            strategy: how the unified placement group is laid out; None:
                `placement_group_strategy`.
            min_nodes: how many nodes are enough to start with; None: all. The bundles
                of the others, which come last, stay asked for: Ray's autoscaler sees
                them, and groups that may shrink (`FailurePolicy.on_node_lost`) start
                workers there when a node comes.
            nodes_deadline_s: how long to wait for nodes that the Ray cluster does not
                have yet, such as those of an autoscaler; None or 0: refuse at once.

        Raises:
            ResourceInsufficientError: the nodes are too small or too few.
            DeadlineExceededError: others hold the resources until the deadline.
            ConfigError: the bundles are reserved in the other form already.
        """
        with self._lock:
            if unified is None:
                unified = self._is_unified
            if self._placement_groups and unified != self._is_unified:
                forms = ["one placement group for each node", "one over all nodes"]
                raise ConfigError(
                    f"cluster {self.name!r} is placed already, with "
                    f"{forms[self._is_unified]}; call place(unified={unified}) before "
                    "anything else uses it"
                )
            if nodes_deadline_s is not None:
                if nodes_deadline_s < 0:
                    raise ConfigError(
                        f"nodes_deadline_s must not be negative: got {nodes_deadline_s}"
                    )
                self._nodes_deadline_s = nodes_deadline_s
            self._min_nodes = self._min_nodes if min_nodes is None else min_nodes
            self._init_placement_groups(strategy, unified)

    def tied_bundles(self, size: int) -> list[tuple[int, list[int]]]:
        """Split all bundles into groups of neighbours, for `bundle_indices_list`.

        As many groups as possible lie on one node, then in one NVLink domain. Groups
        span nodes only where the bundles are in one placement group
        (`place(unified=True)`).

        Raises:
            ConfigError: the size does not divide the bundles of a placement group.
        """
        return [
            (index, [place.bundle for place in group])
            for index, slots in enumerate(self.slots())
            for group in split_into_groups([slot.place for slot in slots], size)
        ]

    def _init_placement_groups(
        self,
        strategy: PlacementStrategy | None = None,
        use_unified_pg: bool | None = None,
    ) -> list[PlacementGroup]:
        """Reserve the bundles if that has not been done; see `place`."""
        with self._lock:
            if use_unified_pg is None:
                use_unified_pg = self._is_unified
            if self._closed:
                raise DistributedError(
                    f"{self.name!r} was shut down; make a new RayVirtualCluster"
                )
            if self._placement_groups:
                return self._placement_groups
            check_min_nodes(self._min_nodes, self._bundle_counts, use_unified_pg)
            init_ray(tls=self._tls, pass_env=self._pass_env)
            with audited("cluster.place", self.name, bundles=self._bundle_counts):
                found = reserve_bundles(
                    self._bundle_counts,
                    self.bundle,
                    live_nodes(),
                    what=f"cluster {self.name!r}",
                    deadline_s=self.deadline_s,
                    strategy=strategy or self.placement_group_strategy,
                    unified=use_unified_pg,
                    min_blocks=self._min_nodes,
                    nodes_deadline_s=self._nodes_deadline_s,
                )
            self._placement_groups, self._slots = found.groups, found.slots
            self._is_unified = use_unified_pg
            return self._placement_groups

    def claim(self, tenant: str, bundles: Iterable[tuple[int, int]]) -> None:
        """Record that group `tenant` has a worker on each (placement group, bundle).

        Raises:
            ResourceInsufficientError: a bundle is full.
        """
        self._tenants.add(tenant, bundles)

    @property
    def num_free_groups(self) -> int:
        """Number of further groups that every bundle has room for."""
        return self._tenants.num_free

    def unclaim(self, tenant: str, bundles: Iterable[tuple[int, int]]) -> None:
        """Release the claims of `claim`; unknown entries are ignored."""
        self._tenants.remove(tenant, bundles)

    def get_available_address_and_port(
        self, pg_idx: int, bundle_idx: int
    ) -> tuple[str, int]:
        """Return the address of a bundle's node and a free port there.

        No port is returned twice.
        """
        return self.get_available_addresses_and_ports_batch([(pg_idx, bundle_idx)])[0]

    def get_available_addresses_and_ports_batch(
        self, pairs: Sequence[tuple[int, int]]
    ) -> list[tuple[str, int]]:
        """Like `get_available_address_and_port`, for many bundles at once."""
        slots = _by_bundle(self.slots())
        for pair in pairs:
            if pair not in slots:
                raise ConfigError(
                    f"cluster {self.name!r} has no (placement group, bundle) {pair}; "
                    f"its groups have {[len(row) for row in self._slots]} bundles"
                )
        chosen = [slots[pair] for pair in pairs]
        return ports_of_slots(self._ports, chosen, self.deadline_s)

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Return an address and a port for a rendezvous, on the first bundle's node."""
        first = self.slots()[0][0]
        return self.get_available_address_and_port(
            first.placement_group_index, first.bundle_index
        )

    def shutdown(self) -> bool:
        """Release the bundles; Ray ends the workers that are still on them.

        May be called more than once; always returns True.
        """
        with self._lock:
            if self._placement_groups:
                audit("cluster.release", self.name)
            # Before the release, so that later calls are refused instead of getting
            # bundles that are going away.
            self._closed = True
            self._release()
        return True

    def _release(self) -> None:
        groups, self._placement_groups = self._placement_groups, []
        self._slots = []
        self._tenants.clear()
        # Without its head node, Ray would end the program during the removal.
        if ray.is_initialized() and find_loss() is None:
            for group in groups:
                remove_placement_group(group)

    def __enter__(self) -> RayVirtualCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(error, self.shutdown, f"cluster {self.name!r}")

    def __repr__(self) -> str:
        return (
            f"RayVirtualCluster({self._bundle_counts}, name={self.name!r}, "
            f"use_gpus={self._requested_gpus}, "
            f"max_colocated_worker_groups={self.max_colocated_worker_groups})"
        )


def _by_bundle(
    rows: Sequence[Sequence[WorkerSlot]],
) -> dict[tuple[int, int], WorkerSlot]:
    """Return the slots of all placement groups by (placement group, bundle)."""
    return {
        (slot.placement_group_index, slot.bundle_index): slot
        for row in rows
        for slot in row
    }
