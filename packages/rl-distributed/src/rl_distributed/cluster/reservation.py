"""Reserve bundles: from counts and nodes to ordered placement groups and slots.

```
capacity of the nodes -> does it fit? -> which nodes -> ask Ray -> wait (deadline)
    -> read where Ray has put the bundles -> order of the ranks over them
```
Blocks that no node has room for are asked for too if they may come later: Ray's
autoscaler adds nodes for what is asked for, and Ray puts them on nodes that join.
"""

from __future__ import annotations

import bisect
import threading
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
from rl_distributed.cluster.start import live_nodes
from rl_distributed.cluster.topology import BundlePlace, order_bundles, order_nodes
from rl_distributed.cluster.watch import raise_if_lost
from rl_distributed.errors import (
    DeadlineExceededError,
    DistributedError,
    ResourceInsufficientError,
)

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = [
    "Reservation",
    "WorkerSlot",
    "current_slots",
    "reserve_bundles",
]

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One bundle of a placed cluster."""

    placement_group_index: int
    bundle_index: int
    node_id: str
    """Empty while no node has had room for it."""
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


@dataclass(frozen=True, slots=True)
class _Request:
    """Placement groups to ask Ray for."""

    sizes: Sequence[int]
    """Bundles of each."""
    strategy: str
    targets: Sequence[str | None]
    """Preferred nodes of those that there is room for, which come first."""
    shortage: ResourceInsufficientError | None
    """Why there is no room for all."""


def reserve_bundles(
    bundle_counts: Sequence[int],
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    *,
    what: str,
    deadline_s: float,
    strategy: PlacementStrategy = "SPREAD",
    unified: bool = False,
    min_blocks: int | None = None,
    nodes_deadline_s: float = 0.0,
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
        min_blocks: how many blocks, all of the same size, must have a node; the others
            come last in the order of ranks and stay asked for. None: all.
        nodes_deadline_s: how long to wait for nodes that are not there yet.

    Raises:
        ResourceInsufficientError: the bundles would not fit even on empty nodes.
        DeadlineExceededError: others hold the resources; nothing is reserved then.
    """
    request = (
        _unified_request(sum(bundle_counts), bundle, nodes, what, strategy)
        if unified
        else _request_per_node(bundle_counts, bundle, nodes, what)
    )
    least = len(request.sizes) if min_blocks is None else min_blocks
    may_wait = nodes_deadline_s > 0
    if request.shortage and len(request.targets) < least and not may_wait:
        raise request.shortage
    # Filled group by group, so that a failure halfway can release those already made.
    groups: list[PlacementGroup] = []
    try:
        _ask(request, bundle, groups)
        # Where there is room for more than the least, that is waited for as well.
        placed = _wait(groups[: len(request.targets)], deadline_s)
        if request.shortage and sum(placed) < least:
            placed = _wait_for_nodes(groups, least, nodes_deadline_s)
        if sum(placed) < least:
            late_s = nodes_deadline_s if request.shortage else deadline_s
            raise _not_placed(request, groups, bundle, what, late_s)
        if request.shortage:
            placed = [_is_placed(group) for group in groups]
        # One that has joined during a wait may have got bundles.
        nodes = live_nodes()
        rows = [
            _read_slots(group, nodes) if is_placed else _unplaced_slots(group)
            for group, is_placed in zip(groups, placed, strict=True)
        ]
    # Also on an interrupt: Ray would hold the bundles for ever.
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise
    order = _order_of_groups(request.sizes, rows, placed)
    slots = [
        [replace(slot, placement_group_index=index) for slot in rows[i]]
        for index, i in enumerate(order)
    ]
    return Reservation([groups[i] for i in order], slots)


def _unified_request(
    total: int,
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    what: str,
    strategy: PlacementStrategy,
) -> _Request:
    try:
        check_unified_placement(total, bundle, nodes, strategy, what=what)
    except ResourceInsufficientError as error:
        return _Request([total], strategy, [], error)
    return _Request([total], strategy, [None], None)


def _request_per_node(
    bundle_counts: Sequence[int],
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    what: str,
) -> _Request:
    nodes = order_nodes(nodes, bundle, sum(bundle_counts))
    shortages: dict[int, ResourceInsufficientError] = {}

    def lacks_room(count: int) -> bool:
        try:
            assign_blocks(bundle_counts[:count], bundle, nodes, what=what)
        except ResourceInsufficientError as error:
            shortages[count] = error
        return count in shortages

    total = len(bundle_counts)
    num_fitting = total
    if lacks_room(total):
        # Fewer blocks never need more room, so that the first that lacks it is found
        # by halving.
        counts = range(1, total + 1)
        num_fitting = bisect.bisect_left(counts, True, key=lacks_room)
    chosen = assign_blocks(bundle_counts[:num_fitting], bundle, nodes, what=what)
    targets = [nodes[index].node_id for index in chosen]
    return _Request(bundle_counts, "STRICT_PACK", targets, shortages.get(total))


def _ask(request: _Request, bundle: Bundle, groups: list[PlacementGroup]) -> None:
    """Request all before waiting for the first, so that Ray can place them at once."""
    for index, size in enumerate(request.sizes):
        targets = request.targets
        groups.append(
            placement_group(
                [bundle.as_resources()] * size,
                strategy=request.strategy,
                # Only a preference: if that node is taken, Ray may choose another.
                _soft_target_node_id=targets[index] if index < len(targets) else None,
            )
        )


def _wait(groups: Sequence[PlacementGroup], deadline_s: float) -> list[bool]:
    """Wait until all are placed, or the deadline; return which are."""
    end = time.monotonic() + deadline_s
    # `wait` fails for a placed group as well if it is given no time.
    return [
        group.wait(max(0.0, end - time.monotonic())) or _is_placed(group)
        for group in groups
    ]


def _wait_for_nodes(
    groups: Sequence[PlacementGroup], least: int, deadline_s: float
) -> list[bool]:
    """Wait until some of the groups are placed, whichever; return which are."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while sum(placed := [_is_placed(group) for group in groups]) < least:
        if time.monotonic() > end:
            break
        raise_if_lost()
        pause.wait(_LOOK_S)
    return placed


def _is_placed(group: PlacementGroup) -> bool:
    table = cast("dict[str, Any]", placement_group_table(group))
    return bool(table["state"] == "CREATED")


def _not_placed(
    request: _Request,
    groups: Sequence[PlacementGroup],
    bundle: Bundle,
    what: str,
    deadline_s: float,
) -> DistributedError:
    if request.shortage is not None:
        return ResourceInsufficientError(
            f"{request.shortage}; no further node came within {deadline_s:g} s "
            "(nodes_deadline_s)"
        )
    group = next(group for group in groups if not _is_placed(group))
    free = ray.available_resources()
    return DeadlineExceededError(
        f"{what} waited {deadline_s:g} s for "
        f"{bundle.times(group.bundle_count)}: the nodes are large enough, but "
        f"others hold them (free now: {shown_number(free.get('CPU', 0.0))} "
        f"CPUs and {shown_number(free.get('GPU', 0.0))} GPUs); shut down other "
        "clusters, share one by max_colocated_worker_groups, or raise "
        "deadline_s"
    )


def _unplaced_slots(group: PlacementGroup) -> list[WorkerSlot]:
    return [WorkerSlot(0, bundle, "", "") for bundle in range(group.bundle_count)]


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
    counts: Sequence[int],
    rows: Sequence[Sequence[WorkerSlot]],
    placed: Sequence[bool],
) -> list[int]:
    """Order of the groups in which neighbours are near; sizes keep their place."""
    # Where Ray has put the blocks is known only now. Those without a node come last.
    firsts = [
        replace(row[0].place, bundle=i) for i, row in enumerate(rows) if placed[i]
    ]
    near = [place.bundle for place in order_bundles(firsts)]
    near += [i for i, is_placed in enumerate(placed) if not is_placed]
    # Ranks follow the requested sizes, so only blocks of equal size may swap places.
    of_size = {
        size: iter([i for i in near if counts[i] == size]) for size in set(counts)
    }
    return [next(of_size[size]) for size in counts]
