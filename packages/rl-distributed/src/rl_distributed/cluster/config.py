"""Section `cluster` of a configuration; reading it starts and imports nothing."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.security.tls_files import TlsFiles

__all__ = ["STRATEGIES", "ClusterConfig", "PlacementStrategy"]

PlacementStrategy = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]
STRATEGIES: tuple[str, ...] = get_args(PlacementStrategy)
"""How Ray can lay out one placement group over nodes."""


class ClusterConfig(Config):
    """Size of one virtual cluster."""

    num_nodes: int = Field(1, gt=0)
    """Nodes that the cluster spans."""
    workers_per_node: int = Field(1, gt=0)
    """Bundles, and so workers of one group, on each node."""
    use_gpus: bool | None = None
    """Whether each worker has a GPU; None: if the Ray cluster has any."""
    placement_group_strategy: PlacementStrategy = "SPREAD"
    """How one placement group over all nodes is laid out, where one is asked for."""
    placement_deadline_s: float = Field(60.0, gt=0)
    """How long to wait for resources that somebody else still holds."""
    unified: bool = False
    """One placement group over all nodes instead of one for each, for engines that
    start their own Ray workers and for tied groups that span nodes."""
    bundle_resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources of each bundle, by name."""
    tls: bool | TlsFiles = False
    """Encrypt what Ray's processes send to each other: true for certificates made for
    a new local cluster, or the three files of a running one."""
    pass_env: list[str] = Field(default_factory=list)
    """Variables of the environment that all processes of a new local cluster get,
    beside those that every process needs: names, or patterns such as `MY_*`, which pass
    no secrets."""
