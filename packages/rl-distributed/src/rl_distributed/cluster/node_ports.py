"""Free ports on any node of the Ray cluster, found by a task there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_distributed.cluster.ports import PortAllocator, PortOwner, reserve_ports
from rl_distributed.cluster.reservation import WorkerSlot
from rl_distributed.errors import (
    DeadlineExceededError,
    ResourceInsufficientError,
    WorkerStartError,
)

__all__ = ["ports_of_node", "ports_of_slots"]

_ATTEMPTS = 10


def ports_of_slots(
    ports: PortAllocator, slots: Sequence[WorkerSlot], deadline_s: float
) -> list[tuple[str, int]]:
    """Reserve a port for each slot; return it with the address of the slot's node.

    Args and errors are those of `ports_of_node`; slots may lie on the same node.
    """
    # Grouped by node, so that each node is asked once for all of its ports.
    positions: dict[str, list[int]] = {}
    for position, slot in enumerate(slots):
        positions.setdefault(slot.node_id, []).append(position)
    result: list[tuple[str, int]] = [("", 0)] * len(slots)
    for node_id, places in positions.items():
        found = ports_of_node(ports, node_id, len(places), deadline_s)
        for position, port in zip(places, found, strict=True):
            result[position] = (slots[position].address, port)
    return result


def ports_of_node(
    ports: PortAllocator, node_id: str, count: int, deadline_s: float
) -> list[int]:
    """Reserve new ports of a node for this process.

    Args:
        ports: records the ports that were given out.
        node_id: Ray's id of the node.
        count: how many.
        deadline_s: how long the node may take to answer.

    Raises:
        DeadlineExceededError: the node does not answer in time.
        ResourceInsufficientError: it has fewer free ports.
        WorkerStartError: the node is lost.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return ports.allocate(node_id, count)
    search = ray.remote(reserve_ports).options(
        # Workers may have claimed all CPUs of the node, and only a port
        # there is of use.
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    for _ in range(_ATTEMPTS):
        reference = search.remote(
            count,
            ports.low,
            ports.high,
            PortOwner.this_process(),
            ports.given(node_id),
        )
        try:
            found = cast("list[int]", ray.get(reference, timeout=deadline_s))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceededError(
                f"node {node_id} did not name a free port in {deadline_s:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise WorkerStartError(
                f"node {node_id} cannot name a free port, as it is lost or its Ray "
                f"process starts no worker: {error}"
            ) from error
        if ports.record(node_id, found):
            return found
    raise ResourceInsufficientError(
        f"no unused ports found on node {node_id} in {_ATTEMPTS} attempts"
    )
