"""Topology: which bundles are near each other, and the order of ranks over them.

Near means, from the nearest: on one node, in one NVLink domain (the nodes that an
NVSwitch fabric joins), in the cluster. Neighbouring ranks talk most, so ranks go over
the bundles of a node, then over those of its domain, then to the next domain. Pure
functions, but for `detect_nvlink_domain`, which asks NVML.
"""

from __future__ import annotations

import ctypes
import ipaddress
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_distributed.cluster.placement import Bundle, NodeCapacity
from rl_distributed.errors import ConfigError

__all__ = [
    "NVLINK_DOMAIN_LABEL",
    "NVLINK_DOMAIN_VARIABLE",
    "BundlePlace",
    "detect_nvlink_domain",
    "nvlink_domain_of",
    "order_bundles",
    "order_nodes",
    "split_into_groups",
]

NVLINK_DOMAIN_LABEL = "rl/nvlink-domain"
"""Label of a Ray node: `ray start --labels rl/nvlink-domain=rack-1`."""
NVLINK_DOMAIN_VARIABLE = "RL_NVLINK_DOMAIN"
"""Variable that gives the label to a cluster which `init_ray` starts."""

# Ray's own name for it comes second: a label of ours is meant for this library.
_LABELS = (NVLINK_DOMAIN_LABEL, "ray.io/gpu-domain")

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class BundlePlace:
    """Location of one bundle of a placement group."""

    bundle: int
    """Index in its placement group."""
    node_id: str
    address: str = ""
    nvlink_domain: str = ""
    """Name of the domain in the whole cluster; empty: the node is one of its own."""

    @property
    def domain(self) -> tuple[str, str]:
        """Unique key of its domain."""
        return _domain(self.nvlink_domain, self.node_id)


def _domain(nvlink_domain: str, node_id: str) -> tuple[str, str]:
    # A node's id is never taken for the name of a domain.
    return ("domain", nvlink_domain) if nvlink_domain else ("node", node_id)


def nvlink_domain_of(labels: Mapping[str, str] | None) -> str:
    """Get the NVLink domain that a node's labels name; empty where they name none."""
    found = (str((labels or {}).get(name, "")) for name in _LABELS)
    return next((name for name in found if name), "")


def _address_key(address: str) -> tuple[int, int, str]:
    """Sort addresses as numbers: 10.0.0.9 before 10.0.0.10; other texts come last."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (9, 0, address)
    return (parsed.version, int(parsed), "")


def order_bundles(places: Iterable[BundlePlace]) -> list[BundlePlace]:
    """Put bundles into the order in which ranks go over them.

    Bundles of a domain come one after the other, in it those of a node, there by
    index. Nodes, and domains by their first node, go by address and then by id. The
    result does not depend on the order that was given.
    """
    given = list(places)
    first: dict[Hashable, tuple[Any, ...]] = {}
    for place in given:
        key = (_address_key(place.address), place.node_id)
        first[place.domain] = min(first.get(place.domain, key), key)
    return sorted(
        given,
        key=lambda place: (
            first[place.domain],
            place.domain,
            _address_key(place.address),
            place.node_id,
            place.bundle,
        ),
    )


def order_nodes(
    nodes: Sequence[NodeCapacity], bundle: Bundle, num_bundles: int
) -> list[NodeCapacity]:
    """Put nodes into the order in which a cluster should take them.

    The smallest domain with room for all bundles comes first, so that the cluster lies
    in one domain where that is possible and large domains stay whole for others. Then
    come the larger ones, then those that are too small, the largest first. In a domain
    the nodes keep the order that was given.
    """
    members = _grouped((_domain(n.nvlink_domain, n.node_id), n) for n in nodes)
    room = {
        domain: sum(node.num_bundles(bundle) for node in inside)
        for domain, inside in members.items()
    }
    positions = {domain: index for index, domain in enumerate(members)}

    def preference(domain: Hashable) -> tuple[bool, int, int]:
        # Among domains with room take the smallest, to keep large ones whole; otherwise
        # the largest, to need few.
        is_small = room[domain] < num_bundles
        size = -room[domain] if is_small else room[domain]
        return (is_small, size, positions[domain])

    return [
        node for domain in sorted(members, key=preference) for node in members[domain]
    ]


def _grouped(pairs: Iterable[tuple[Hashable, _Item]]) -> dict[Hashable, list[_Item]]:
    groups: dict[Hashable, list[_Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def split_into_groups(
    places: Iterable[BundlePlace], size: int
) -> list[list[BundlePlace]]:
    """Split bundles into groups of `size` that lie as near together as can be.

    As many groups as possible are on one node; of what is left as many as possible in
    one domain; only the rest crosses domains. For the workers of one model-parallel
    replica, say.

    Returns:
        The groups by their first bundle in the order of `order_bundles`, in which each
        group's bundles are too.

    Raises:
        ConfigError: the bundles are no multiple of `size`.
    """
    ordered = order_bundles(places)
    if size < 1 or len(ordered) % size:
        raise ConfigError(
            f"{len(ordered)} bundles cannot be split into groups of {size}; the size "
            "must divide their number"
        )
    position = {place: index for index, place in enumerate(ordered)}
    groups: list[list[BundlePlace]] = []
    rest = ordered
    # Nearest level first; bundles that do not fill a group move on to the next.
    for level in (lambda p: (p.domain, p.node_id), lambda p: p.domain, lambda p: None):
        parts = _grouped((level(place), place) for place in rest)
        rest = []
        for part in parts.values():
            whole = len(part) - len(part) % size
            groups += [part[i : i + size] for i in range(0, whole, size)]
            rest += part[whole:]
        rest.sort(key=position.__getitem__)
    return sorted(groups, key=lambda group: position[group[0]])


def detect_nvlink_domain() -> str:
    """Return the NVLink domain of this machine's GPUs as NVML knows it.

    Returns:
        Cluster id and clique of the fabric, the same on all its nodes; empty where
        there is no NVML, no GPU, or no fabric between machines.
    """
    try:
        import pynvml  # noqa: PLC0415 - the extra `nvml`
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    # An older driver or pynvml does not know about fabrics.
    except (pynvml.NVMLError, AttributeError):
        return ""
    finally:
        pynvml.nvmlShutdown()
    cluster = bytes(bytearray(info.clusterUuid)).ljust(16, b"\x00")
    if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return ""
    return f"{cluster.hex()}.{info.cliqueId}"
