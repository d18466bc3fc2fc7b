"""Assign each worker of a group to a bundle: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_distributed.errors import ConfigError

if TYPE_CHECKING:
    from rl_distributed.cluster.virtual_cluster import WorkerSlot

__all__ = ["WorkerSeat", "lay_out_workers"]

TiedBundles = tuple[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """Place of one worker in its group and in the cluster."""

    rank: int
    slot: WorkerSlot
    node_rank: int
    """Ordinal of its node among those that the group uses."""
    local_rank: int
    """Ordinal among the group's workers on that node."""
    tied_group: int
    """Ordinal of the tied group that it belongs to; its own rank where none are."""
    leads_with: tuple[int, tuple[int, ...]] | None
    """(placement group, bundles) of the tied group if it is the first in it."""

    @property
    def bundle(self) -> tuple[int, int]:
        """(placement group, bundle) that it sits on."""
        return (self.slot.placement_group_index, self.slot.bundle_index)


def lay_out_workers(
    slots: Sequence[Sequence[WorkerSlot]],
    workers_per_node: int | Sequence[int] | None = None,
    bundle_indices_list: Sequence[TiedBundles] | None = None,
) -> list[WorkerSeat]:
    """Give every worker a bundle, in the order of ranks.

    Args:
        slots: the bundles of each placement group.
        workers_per_node: how many bundles of each placement group to use, one number
            for all or one each; None: all.
        bundle_indices_list: tied groups, each (placement group, bundles); one worker
            per bundle, the first of each tuple leads.

    Raises:
        ConfigError: numbers do not fit the cluster, or a bundle is named twice.
    """
    if bundle_indices_list is None:
        tied = _one_per_bundle(slots, workers_per_node)
    else:
        if workers_per_node is not None:
            raise ConfigError(
                "workers_per_node and bundle_indices_list exclude each other: the "
                "second already says where every worker goes"
            )
        tied = _checked_groups(slots, bundle_indices_list)
    seats: list[WorkerSeat] = []
    node_ranks: dict[tuple[int, str], int] = {}
    local_sizes: dict[int, int] = {}
    for ordinal, (group_index, chosen) in enumerate(tied):
        bundles = tuple(slot.bundle_index for slot in chosen)
        for position, slot in enumerate(chosen):
            node = (group_index, slot.node_id)
            node_rank = node_ranks.setdefault(node, len(node_ranks))
            local_rank = local_sizes.get(node_rank, 0)
            local_sizes[node_rank] = local_rank + 1
            leads_with = (group_index, bundles) if position == 0 else None
            seats.append(
                WorkerSeat(len(seats), slot, node_rank, local_rank, ordinal, leads_with)
            )
    return seats


def _one_per_bundle(
    slots: Sequence[Sequence[WorkerSlot]],
    workers_per_node: int | Sequence[int] | None,
) -> list[tuple[int, list[WorkerSlot]]]:
    available = [len(bundles) for bundles in slots]
    if workers_per_node is None:
        counts = available
    # bool is a subclass of int, so True would mean one worker per node.
    elif isinstance(workers_per_node, int) and not isinstance(workers_per_node, bool):
        counts = [workers_per_node] * len(slots)
    elif isinstance(workers_per_node, Sequence) and not isinstance(
        workers_per_node, str
    ):
        counts = list(workers_per_node)
    else:
        raise ConfigError(
            "workers_per_node must be a number, a list of numbers or None: got "
            f"{workers_per_node!r}"
        )
    if len(counts) != len(slots):
        raise ConfigError(
            f"workers_per_node must have one number for each of the {len(slots)} "
            f"nodes of the cluster: got {counts}"
        )
    for node, (count, most) in enumerate(zip(counts, available, strict=True)):
        if not 0 <= count <= most:
            raise ConfigError(
                f"workers_per_node must be between 0 and the {most} bundles of node "
                f"{node}: got {count}; a bundle takes one worker of a group"
            )
    if not any(counts):
        raise ConfigError(f"workers_per_node leaves no worker at all: got {counts}")
    return [
        (index, [slot])
        for index, bundles in enumerate(slots)
        for slot in bundles[: counts[index]]
    ]


def _checked_groups(
    slots: Sequence[Sequence[WorkerSlot]], groups: Sequence[TiedBundles]
) -> list[tuple[int, list[WorkerSlot]]]:
    by_place = {
        (slot.placement_group_index, slot.bundle_index): slot
        for bundles in slots
        for slot in bundles
    }
    seen: set[tuple[int, int]] = set()
    tied: list[tuple[int, list[WorkerSlot]]] = []
    for index, bundles in groups:
        if not bundles:
            raise ConfigError(
                f"bundle_indices_list has a group without bundles: {(index, bundles)}"
            )
        for bundle in bundles:
            place = (index, bundle)
            if place not in by_place:
                raise ConfigError(
                    f"bundle_indices_list names bundle {place}, which the cluster "
                    f"does not have; its placement groups have "
                    f"{[len(row) for row in slots]} bundles"
                )
            # A bundle holds the share of only one worker per group.
            if place in seen:
                raise ConfigError(f"bundle_indices_list names bundle {place} twice")
            seen.add(place)
        tied.append((index, [by_place[(index, bundle)] for bundle in bundles]))
    if not tied:
        raise ConfigError("bundle_indices_list has no group; leave it out to use all")
    return tied
