"""Placement of bundles on nodes: pure functions.

A *bundle* is the smallest unit of placement: some CPUs and GPUs on one node. A *block*
is a number of equal bundles that must be on the same node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_distributed.errors import ResourceInsufficientError

__all__ = [
    "Bundle",
    "NodeCapacity",
    "assign_blocks",
    "check_unified_placement",
    "shown_number",
]

# Ray counts resources in ten-thousandths.
_GRANULARITY = 10_000
# Beyond this many unequal blocks the greedy answer stands.
_MOST_SEARCHED_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one worker slot on its node."""

    num_cpus: float
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Further resources by the names that Ray's nodes have them under."""

    def as_resources(self) -> dict[str, float]:
        """Return the bundle as Ray's resources, without those that it does not need."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    def times(self, count: int) -> str:
        """Return what `count` bundles need, for messages: `4 CPUs and 2 GPUs`."""
        parts = [f"{shown_number(self.num_cpus * count)} CPUs"]
        if self.num_gpus:
            parts.append(f"{shown_number(self.num_gpus * count)} GPUs")
        parts += [
            f"{shown_number(amount * count)} {name}"
            for name, amount in self.resources.items()
        ]
        return _listed(parts)


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """Total resources of a node of the cluster."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: float = 0.0
    nvlink_domain: str = ""
    """Name of the NVLink domain that it is in; empty: none with other nodes."""
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Further resources."""

    @classmethod
    def from_resources(
        cls,
        node_id: str,
        address: str,
        resources: Mapping[str, float],
        nvlink_domain: str = "",
    ) -> NodeCapacity:
        """Read the entry of one node in `ray.nodes()`."""
        own = {
            name: float(amount)
            for name, amount in resources.items()
            if name not in ("CPU", "GPU")
        }
        return cls(
            node_id,
            address,
            float(resources.get("CPU", 0.0)),
            float(resources.get("GPU", 0.0)),
            nvlink_domain,
            own,
        )

    def has(self, name: str) -> float:
        """Return the amount of one resource of the node."""
        own = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return own[name] if name in own else self.resources.get(name, 0.0)

    def num_bundles(self, bundle: Bundle) -> int:
        """Return how many bundles of this kind fit on the empty node."""
        # In integers, because in floating point 1.0 // 0.1 is 9.
        limits = [
            round(self.has(name) * _GRANULARITY) // round(need * _GRANULARITY)
            for name, need in bundle.as_resources().items()
        ]
        return min(limits, default=0)

    def without(self, bundle: Bundle, count: int) -> NodeCapacity:
        """Return the node with `count` bundles taken."""
        return replace(
            self,
            num_cpus=self.num_cpus - count * bundle.num_cpus,
            num_gpus=self.num_gpus - count * bundle.num_gpus,
            resources={
                name: have - count * bundle.resources.get(name, 0.0)
                for name, have in self.resources.items()
            },
        )


def shown_number(value: float) -> str:
    """Return a resource amount without a needless fraction: `2`, `0.5`."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


def _listed(parts: Sequence[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _candidates(size: int, free: Sequence[int], used: set[int]) -> list[int]:
    """Nodes with room for a block: unused ones first, then the fullest."""
    return sorted(
        (node for node in range(len(free)) if free[node] >= size),
        key=lambda node: (node in used, free[node], node),
    )


def _assign_greedily(sizes: Sequence[int], capacity: Sequence[int]) -> list[int] | None:
    free, used, nodes = list(capacity), set[int](), []
    for size in sizes:
        node = next(iter(_candidates(size, free, used)), None)
        if node is None:
            return None
        nodes.append(node)
        free[node] -= size
        used.add(node)
    return nodes


def _assign_by_search(
    sizes: Sequence[int], capacity: Sequence[int]
) -> list[int] | None:
    """Search exactly, for the few unequal blocks for which the greedy way fails."""
    hopeless: set[tuple[int, tuple[int, ...]]] = set()

    def search(position: int, free: list[int], used: set[int]) -> list[int] | None:
        if position == len(sizes):
            return []
        # Nodes with equal room are interchangeable, so sorting merges
        # equivalent states.
        state = (position, tuple(sorted(free)))
        if state in hopeless:
            return None
        for node in _candidates(sizes[position], free, used):
            left = list(free)
            left[node] -= sizes[position]
            tail = search(position + 1, left, used | {node})
            if tail is not None:
                return [node, *tail]
        # Remembered, so that equivalent states are searched only once.
        hopeless.add(state)
        return None

    return search(0, list(capacity), set())


def _assign(sizes: Sequence[int], capacity: Sequence[int]) -> list[int] | None:
    nodes = _assign_greedily(sizes, capacity)
    # For equal blocks, or too little room in total, the greedy answer is exact.
    exact = len(set(sizes)) == 1 or sum(sizes) > sum(capacity)
    if nodes is not None or exact or len(sizes) > _MOST_SEARCHED_BLOCKS:
        return nodes
    return _assign_by_search(sizes, capacity)


def assign_blocks(
    bundle_counts: Sequence[int],
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    *,
    what: str = "the cluster",
) -> list[int]:
    """Give every block a node: different nodes where possible, shared otherwise.

    Args:
        bundle_counts: size of each block in bundles.
        bundle: what one bundle takes.
        nodes: the nodes there are, empty.
        what: who asks, for the message.

    Returns:
        For each block the position of its node in `nodes`.

    Raises:
        ResourceInsufficientError: the blocks do not fit.
    """
    capacity = [node.num_bundles(bundle) for node in nodes]
    # Largest first, because small blocks still fit into the remaining gaps.
    order = sorted(range(len(bundle_counts)), key=lambda i: (-bundle_counts[i], i))
    fits_one = max(bundle_counts, default=0) <= max(capacity, default=0)
    found = _assign([bundle_counts[i] for i in order], capacity) if fits_one else None
    if found is None:
        need = f"{bundle.times(sum(bundle_counts))} on one node"
        if len(bundle_counts) > 1:
            need = (
                f"{bundle.times(sum(bundle_counts))} on {len(bundle_counts)} nodes "
                f"({_per_node(bundle_counts, bundle)})"
            )
        remedy = (
            "ask for fewer workers or add nodes"
            if fits_one
            else "ask for fewer workers per node or add a larger node"
        )
        raise ResourceInsufficientError(
            f"{what} needs {need}; {_describe(nodes, bundle)}; {remedy}"
        )
    node_of = dict(zip(order, found, strict=True))
    return [node_of[i] for i in range(len(bundle_counts))]


def check_unified_placement(
    num_bundles: int,
    bundle: Bundle,
    nodes: Sequence[NodeCapacity],
    strategy: str,
    *,
    what: str = "the cluster",
) -> None:
    """Check that one placement group of `num_bundles` fits with a Ray strategy.

    Raises:
        ResourceInsufficientError: the bundles do not fit.
    """
    capacity = [node.num_bundles(bundle) for node in nodes]
    if strategy == "STRICT_PACK":
        room, rule = max(capacity, default=0), "all on one node (STRICT_PACK)"
    elif strategy == "STRICT_SPREAD":
        room = sum(count > 0 for count in capacity)
        rule = "each on its own node (STRICT_SPREAD)"
    else:
        # SPREAD and PACK are preferences that Ray drops if they cannot be met.
        room, rule = sum(capacity), f"in {num_bundles} equal bundles"
    if num_bundles > room:
        raise ResourceInsufficientError(
            f"{what} needs {bundle.times(num_bundles)} {rule}; "
            f"{_describe(nodes, bundle)}; ask for fewer workers or add nodes"
        )


def _per_node(bundle_counts: Sequence[int], bundle: Bundle) -> str:
    if len(set(bundle_counts)) == 1:
        return f"{bundle.times(bundle_counts[0])} on each"
    return ", ".join(bundle.times(count) for count in bundle_counts)


def _describe(nodes: Sequence[NodeCapacity], bundle: Bundle) -> str:
    """Count what the nodes have: CPUs, GPUs, and the bundle's own resources."""

    def amount(chosen: Sequence[NodeCapacity]) -> str:
        shown = [("CPU", "CPUs"), ("GPU", "GPUs")]
        shown += [(name, name) for name in bundle.resources]
        return _listed(
            [
                f"{shown_number(sum(node.has(name) for node in chosen))} {label}"
                for name, label in shown
            ]
        )

    if not nodes:
        return "the cluster has no node"
    if len(nodes) == 1:
        return f"the cluster has {amount(nodes)} on 1 node"
    most = max(nodes, key=lambda node: (node.num_gpus, node.num_cpus))
    return (
        f"the cluster has {amount(nodes)} on {len(nodes)} nodes, at most "
        f"{amount([most])} on one"
    )
