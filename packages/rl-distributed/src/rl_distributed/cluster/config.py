"""Section `cluster` of a configuration; reading it starts and imports nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_distributed.security.tls_files import TlsFiles

__all__ = [
    "STRATEGIES",
    "ClusterConfig",
    "ClusterSize",
    "PlacementStrategy",
    "check_bundle_resources",
    "check_min_nodes",
]

PlacementStrategy = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]
STRATEGIES: tuple[str, ...] = get_args(PlacementStrategy)
"""How Ray can lay out one placement group over nodes."""
_LEAST_AMOUNT = 1e-4


class ClusterSize(Config):
    """Size of one virtual cluster."""

    num_nodes: int = Field(1, gt=0)
    """Nodes that the cluster spans."""
    min_nodes: int | None = Field(None, gt=0)
    """Nodes that are enough to start with; null: all of `num_nodes`. Ray stays asked
    for the others, so that an autoscaler adds them, and groups that can do without some
    of their workers start those when a node comes."""
    nodes_deadline_s: float = Field(0.0, ge=0)
    """How long to wait for nodes that the Ray cluster does not have yet, such as those
    of an autoscaler; with 0, a cluster that is too small is refused at once."""
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

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        check_min_nodes(self.min_nodes, [1] * self.num_nodes, self.unified)
        check_bundle_resources(self.bundle_resources, self.use_gpus)
        return self

    @property
    def num_bundles(self) -> int:
        """Number of bundles on all nodes."""
        return self.num_nodes * self.workers_per_node


class ClusterConfig(ClusterSize):
    """Size of one virtual cluster, and the Ray cluster that it is a part of."""

    tls: bool | TlsFiles = False
    """Encrypt what Ray's processes send to each other: true for certificates made for
    a new local cluster, or the three files of a running one."""
    pass_env: list[str] = Field(default_factory=list)
    """Variables of the environment that all processes of a new local cluster get,
    beside those that every process needs: names, or patterns such as `MY_*`, which pass
    no secrets."""


def check_bundle_resources(
    resources: Mapping[str, float], use_gpus: bool | None
) -> None:
    """Refuse further resources of a bundle that Ray would not take.

    Args:
        resources: Amounts by name.
        use_gpus: Whether a bundle has a GPU beside them; None: not known yet.

    Raises:
        ConfigError: An amount is wrong, or a bundle would have nothing.
    """
    for name, amount in resources.items():
        # Ray counts in steps of this size.
        is_enough = _LEAST_AMOUNT <= amount < math.inf
        if name == "GPU" or not (is_enough or (name == "CPU" and amount == 0)):
            raise ConfigError(
                "bundle_resources must map names other than GPU to finite amounts of "
                f"at least {_LEAST_AMOUNT:g}, 0 for CPU alone: got {name!r}: "
                f"{amount!r}; GPUs follow from use_gpus"
            )
    if resources.get("CPU") == 0 and len(resources) == 1 and not use_gpus:
        raise ConfigError(
            "bundle_resources must name another resource beside 0 CPU, as Ray takes no "
            f"empty bundle: got {dict(resources)}"
        )


def check_min_nodes(
    min_nodes: int | None, bundle_counts: Sequence[int], unified: bool
) -> None:
    """Refuse a smallest number of nodes that a cluster cannot start with.

    Args:
        min_nodes: That number; None: all.
        bundle_counts: Bundles of each node.
        unified: Whether one placement group holds all bundles.

    Raises:
        ConfigError: It is out of range, or the nodes cannot come one by one.
    """
    if min_nodes is None:
        return
    if not 1 <= min_nodes <= len(bundle_counts):
        raise ConfigError(
            f"min_nodes must be between 1 and the {len(bundle_counts)} nodes of the "
            f"cluster: got {min_nodes}"
        )
    if unified:
        raise ConfigError(
            "min_nodes needs a placement group for each node: got unified=true, with "
            "which Ray places all nodes or none; leave either out"
        )
    if len(set(bundle_counts)) > 1:
        raise ConfigError(
            "min_nodes needs the same number of bundles on each node, as any of them "
            f"may be the one that is missing: got {list(bundle_counts)}"
        )
