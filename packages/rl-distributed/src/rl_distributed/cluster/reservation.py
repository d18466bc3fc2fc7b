"""Reserve bundles: from counts and nodes to ordered placement groups and slots.

```
capacity of the nodes -> does it fit? -> which nodes -> ask Ray -> wait (deadline)
    -> read where Ray has put the bundles -> order of the ranks over them
```
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rl_distributed.cluster.config import PlacementStrategy
from rl_distributed.cluster.placement import (
    Bundle,
    NodeCapacity,
    assign_blocks,
    check_unified_placement,
    shown_number,
)
from rl_distributed.cluster.topology import BundlePlace, order_bundles, order_nodes
from rl_distributed.errors import DeadlineExceededError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = [
    "Reservation",
    "WorkerSlot",
    "current_slots",
    "reserve_bundles",
]


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One bundle of a placed cluster."""

    placement_group_index: int
    bundle_index: int
    node_id: str
    address: str
    nvlink_domain: str = ""
    """Name of the NVLink domain of the node; empty: none with other nodes."""

    @property
    def place(self) -> BundlePlace:
        """Its location, for ordering."""
        return BundlePlace(
            self.bundle_index, self.node_id, self.address, self.nvlink_domain
        )


@dataclass(slots=True)
class Reservation:
    """Bundles that Ray holds for one cluster."""

    groups: list[PlacementGroup]
    """The placement groups in the order of ranks."""
    slots: list[list[WorkerSlot]]
    """Bundles of each placement group in the order of ranks."""


def reserve_bundles(
    bundle_counts: Sequence[int],
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    *,
    what: str,
    deadline_s: float,
    strategy: PlacementStrategy = "SPREAD",
    unified: bool = False,
) -> Reservation:
    """Reserve bundles on the nodes of the Ray cluster that this process is in.

    Args:
        bundle_counts: bundles of each block; a block lies on one node.
        bundle: what one bundle takes.
        nodes: the available nodes.
        what: name of the cluster, for messages.
        deadline_s: how long to wait for resources that others hold.
        strategy: layout of a unified placement group.
        unified: one placement group for all bundles instead of one for each block.

    Raises:
        ResourceInsufficientError: the bundles would not fit even on empty nodes.
        DeadlineExceededError: others hold the resources; nothing is reserved then.
    """
    # Filled group by group, so that a failure halfway can release those already made.
    groups: list[PlacementGroup] = []
    try:
        if unified:
            total = sum(bundle_counts)
            check_unified_placement(total, bundle, nodes, strategy, what=what)
            resources = [bundle.as_resources()] * total
            groups.append(placement_group(resources, strategy=strategy))
        else:
            _request_per_node(bundle_counts, bundle, nodes, what, groups)
        _wait(groups, bundle, what, deadline_s)
        rows = [_read_slots(group, nodes) for group in groups]
    # Also on an interrupt: Ray would hold the bundles for ever.
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise
    # Where Ray has put the blocks is known only now.
    counts = [sum(bundle_counts)] if unified else bundle_counts
    order = _order_of_groups(counts, rows)
    slots = [
        [replace(slot, placement_group_index=index) for slot in rows[i]]
        for index, i in enumerate(order)
    ]
    return Reservation([groups[i] for i in order], slots)


def _request_per_node(
    bundle_counts: Sequence[int],
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    what: str,
    groups: list[PlacementGroup],
) -> None:
    nodes = order_nodes(nodes, bundle, sum(bundle_counts))
    chosen = assign_blocks(bundle_counts, bundle, nodes, what=what)
    # Request all before waiting for the first, so that Ray can place them at once.
    for count, node in zip(bundle_counts, chosen, strict=True):
        groups.append(
            placement_group(
                [bundle.as_resources()] * count,
                strategy="STRICT_PACK",
                # Only a preference: if that node is taken, Ray may choose another.
                _soft_target_node_id=nodes[node].node_id,
            )
        )


def _wait(
    groups: Sequence[PlacementGroup], bundle: Bundle, what: str, deadline_s: float
) -> None:
    end = time.monotonic() + deadline_s
    for group in groups:
        if not group.wait(max(0.0, end - time.monotonic())):
            free = ray.available_resources()
            raise DeadlineExceededError(
                f"{what} waited {deadline_s:g} s for "
                f"{bundle.times(group.bundle_count)}: the nodes are large enough, but "
                f"others hold them (free now: {shown_number(free.get('CPU', 0.0))} "
                f"CPUs and {shown_number(free.get('GPU', 0.0))} GPUs); shut down other "
                "clusters, share one by max_colocated_worker_groups, or raise "
                "deadline_s"
            )


def _read_slots(
    group: PlacementGroup, nodes: Sequence[NodeCapacity]
) -> list[WorkerSlot]:
    table = cast("dict[str, Any]", placement_group_table(group))
    by_id = {node.node_id: node for node in nodes}
    places = []
    for bundle, node_id in table["bundles_to_node_id"].items():
        node = by_id.get(node_id)
        address, domain = (node.address, node.nvlink_domain) if node else ("", "")
        places.append(BundlePlace(bundle, node_id, address, domain))
    return [
        WorkerSlot(0, place.bundle, place.node_id, place.address, place.nvlink_domain)
        for place in order_bundles(places)
    ]


def current_slots(
    groups: Sequence[PlacementGroup],
    slots: Sequence[Sequence[WorkerSlot]],
    nodes: Sequence[NodeCapacity],
) -> list[list[WorkerSlot]]:
    """Return the same slots on the nodes where Ray has their bundles now.

    After the loss of a node Ray moves its bundles to where there is room.

    Args:
        groups: the placement groups.
        slots: their bundles as they were.
        nodes: the nodes there are.

    Returns:
        The slots in the same order; `node_id` is empty where a bundle has no place, or
        one on a node that is not among `nodes`.
    """
    by_id = {node.node_id: node for node in nodes}
    found = []
    for group, row in zip(groups, slots, strict=True):
        table = cast("dict[str, Any]", placement_group_table(group))
        places = table.get("bundles_to_node_id", {})
        # Until Ray has placed a group again, its table may still name the old nodes.
        settled = table.get("state") == "CREATED"
        moved = []
        for slot in row:
            node = by_id.get(places.get(slot.bundle_index, "")) if settled else None
            node_id = "" if node is None else node.node_id
            address = slot.address if node is None else node.address
            domain = slot.nvlink_domain if node is None else node.nvlink_domain
            moved.append(
                replace(slot, node_id=node_id, address=address, nvlink_domain=domain)
            )
        found.append(moved)
    return found


def _order_of_groups(
    counts: Sequence[int], rows: Sequence[Sequence[WorkerSlot]]
) -> list[int]:
    """Order of the groups in which neighbours are near; sizes keep their place."""
    firsts = [replace(row[0].place, bundle=i) for i, row in enumerate(rows)]
    near = [place.bundle for place in order_bundles(firsts)]
    # Ranks follow the requested sizes, so only blocks of equal size may swap places.
    of_size = {
        size: iter([i for i in near if counts[i] == size]) for size in set(counts)
    }
    return [next(of_size[size]) for size in counts]
