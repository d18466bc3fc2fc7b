"""Virtual clusters with the signatures of NeMo RL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_algorithms.compat.nemo_rl.differences import warn_difference
from rl_algorithms.compat.nemo_rl.options import refuse_keys
from rl_distributed import cluster

__all__ = ["RayVirtualCluster", "init_ray"]

_TOPOLOGY = (None, "tied_bundles orders bundles by node and NVLink domain")
_REFUSED = {
    "segment_size": _TOPOLOGY,
    "node_resource_constraints": (
        None,
        "bundle_resources of rl_distributed.RayVirtualCluster demands resources",
    ),
}


def init_ray(log_dir: str | None = None) -> None:
    """See `rl_distributed.init_ray`; attaches to the cluster of `RAY_ADDRESS`, if set.

    Args:
        log_dir: Ignored with a warning: Ray's logs are in its own folder.
    """
    if log_dir is not None:
        warn_difference(
            f"init_ray ignores log_dir={log_dir!r}: configure_logging of "
            "rl_distributed.logs writes the logs of all processes to a folder"
        )
    cluster.init_ray()


class RayVirtualCluster(cluster.RayVirtualCluster):
    """See `rl_distributed.RayVirtualCluster`; one group per bundle by default.

    Args:
        bundle_ct_per_node_list: Bundles per node.
        use_gpus: One GPU per bundle; None: if the Ray cluster has GPUs.
        max_colocated_worker_groups: Number of groups that may share a bundle.
        num_gpus_per_node: Maximum number of GPU bundles of a node.
        name: Name in messages.
        placement_group_strategy: Layout of a placement group over all nodes.
        port_range_low: First port to hand out.
        port_range_high: End (exclusive) of the ports to hand out.
        segment_size: Not supported.
        node_resource_constraints: Not supported.

    Raises:
        ConfigError: An unsupported argument is given.
    """

    def __init__(  # noqa: PLR0917 - the signature of NeMo RL
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool | None = None,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: Any = "SPREAD",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        segment_size: int | None = None,
        node_resource_constraints: Mapping[str, Any] | None = None,
    ) -> None:
        topology = {
            "segment_size": segment_size,
            "node_resource_constraints": node_resource_constraints,
        }
        refuse_keys(topology, _REFUSED, "RayVirtualCluster")
        super().__init__(
            bundle_ct_per_node_list,
            use_gpus,
            max_colocated_worker_groups,
            num_gpus_per_node,
            name,
            placement_group_strategy,
            port_range_low,
            port_range_high,
        )
