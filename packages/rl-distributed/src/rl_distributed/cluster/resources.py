"""Assignment of worker groups to clusters: colocated on one, or apart.

`plan_clusters` is a pure function from requests and nodes to clusters; the
`ResourceManager` asks Ray for the nodes and makes the clusters. `check_clusters` checks
clusters that somebody else has planned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Literal

from pydantic import Field

from rl_distributed.cluster.config import ClusterSize, PlacementStrategy
from rl_distributed.cluster.placement import (
    Bundle,
    NodeCapacity,
    assign_blocks,
    check_unified_placement,
)
from rl_distributed.cluster.start import init_ray, live_nodes
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.config import Config
from rl_distributed.errors import ConfigError, ResourceInsufficientError
from rl_distributed.process.closing import close_after
from rl_distributed.security.tls_files import TlsFiles
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "ClusterPlan",
    "GroupRequest",
    "ResourceConfig",
    "ResourceManager",
    "check_clusters",
    "plan_clusters",
]

logger = logging.getLogger(__name__)


class GroupRequest(Config):
    """Resources of one worker group."""

    num_nodes: int = Field(default=1, ge=1)
    """Nodes that the group spans."""
    workers_per_node: int = Field(default=1, ge=1)
    """Workers of the group on each node."""
    use_gpus: bool | None = None
    """Whether each worker has a GPU; None: if the Ray cluster has any."""
    unified: bool = False
    """One placement group over all its nodes, for engines that start their own Ray
    workers and for tied groups that span nodes."""
    bundle_resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources of each worker, by name."""


class ResourceConfig(Config):
    """Resources of all groups, and which groups share bundles."""

    groups: dict[str, GroupRequest]
    """The worker groups by name."""
    placement: Literal["auto", "colocated", "apart"] = "auto"
    """`colocated`: all groups share one set of bundles; `apart`: each has its own;
    `auto`: apart where the cluster has room for it, else colocated."""
    colocated: list[list[str]] = Field(default_factory=list)
    """Sets of groups that always share bundles, whatever `placement` says."""
    placement_group_strategy: PlacementStrategy = "SPREAD"
    """How one placement group over all nodes is laid out, where one is asked for."""
    placement_deadline_s: float = Field(default=60.0, gt=0)
    """How long to wait for resources that somebody else still holds."""
    start_deadline_s: float = Field(default=60.0, gt=0)
    """How long Ray may take to start or to answer, where it is not up."""
    tls: bool | TlsFiles = False
    """As for `init_ray`, where Ray is not up."""
    pass_env: list[str] = Field(default_factory=list)
    """As for `init_ray`, where Ray is not up."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """One cluster to make, and the groups on it."""

    name: str
    bundle_ct_per_node_list: tuple[int, ...]
    use_gpus: bool
    groups: tuple[str, ...]
    unified: bool = False
    """Whether one placement group holds the bundles of all nodes."""
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Further resources of each bundle."""

    @property
    def max_colocated_worker_groups(self) -> int:
        """Number of groups that share each bundle."""
        return len(self.groups)

    @property
    def bundle(self) -> Bundle:
        """Resources of one bundle on its node."""
        resources = dict(self.resources)
        # With GPUs one per group, so that colocated groups do not wait for each
        # other's CPU.
        usual = float(self.max_colocated_worker_groups) if self.use_gpus else 1.0
        return Bundle(resources.pop("CPU", usual), float(self.use_gpus), resources)

    def describe(self) -> str:
        """Describe in one line the resources of the cluster and its groups."""
        counts = self.bundle_ct_per_node_list
        where = "1 node" if len(counts) == 1 else f"{len(counts)} nodes"
        shared = " in turn" if len(self.groups) > 1 else ""
        return (
            f"{self.bundle.times(sum(counts))} on {where} for "
            f"{', '.join(self.groups)}{shared}"
        )


def plan_clusters(
    config: ResourceConfig, nodes: Sequence[NodeCapacity]
) -> list[ClusterPlan]:
    """Decide on the clusters for a request.

    Args:
        config: the request.
        nodes: the nodes there are, empty.

    Returns:
        The clusters in the order in which their first groups are named; every group is
        on exactly one.

    Raises:
        ConfigError: names are unknown, or groups that share bundles do not match.
        ResourceInsufficientError: the clusters do not fit on the nodes together.
    """
    if not config.groups:
        raise ConfigError("groups must name at least one worker group: got none")
    together = _checked_sets(config)
    everything = [list(config.groups)]
    if config.placement == "colocated":
        return _fitted(config, everything, nodes)
    if config.placement == "apart":
        return _fitted(config, together, nodes)
    try:
        return _fitted(config, together, nodes)
    # The first error describes the preferred layout, so it is the one to raise.
    except ResourceInsufficientError:
        if not _can_share(config, everything[0], nodes):
            raise
        return _fitted(config, everything, nodes)


def _checked_sets(config: ResourceConfig) -> list[list[str]]:
    """All groups as disjoint sets that share bundles, in the order of the request."""
    set_of: dict[str, list[str]] = {}
    for names in config.colocated:
        for name in names:
            if name not in config.groups:
                raise ConfigError(
                    f"colocated names {name!r}, which is no group; there are "
                    f"{list(config.groups)}{did_you_mean(name, config.groups)}"
                )
            if name in set_of:
                raise ConfigError(f"colocated names group {name!r} more than once")
            set_of[name] = names
    sets: list[list[str]] = []
    for name in config.groups:
        own = set_of.get(name, [name])
        if own not in sets:
            sets.append(own)
    return sets


def _gpus_of(request: GroupRequest, nodes: Sequence[NodeCapacity]) -> bool:
    if request.use_gpus is not None:
        return request.use_gpus
    return any(node.num_gpus >= 1 for node in nodes)


def _mismatch(
    config: ResourceConfig, names: Sequence[str], nodes: Sequence[NodeCapacity]
) -> str:
    """Why these groups cannot share bundles; empty where they can."""
    # Comparing neighbours suffices, because equality is transitive.
    for first, second in pairwise(names):
        one, other = config.groups[first], config.groups[second]
        if _gpus_of(one, nodes) != _gpus_of(other, nodes):
            return f"one of {first!r} and {second!r} uses GPUs and the other does not"
        if one.num_nodes != other.num_nodes:
            return (
                f"{first!r} spans {one.num_nodes} nodes and {second!r} "
                f"{other.num_nodes}"
            )
        if one.unified != other.unified:
            return (
                f"one of {first!r} and {second!r} wants one placement group over all "
                "nodes (unified) and the other does not"
            )
        if one.bundle_resources != other.bundle_resources:
            return (
                f"{first!r} wants {one.bundle_resources or 'no further resources'} and "
                f"{second!r} {other.bundle_resources or 'none'}"
            )
    return ""


def _can_share(
    config: ResourceConfig, names: Sequence[str], nodes: Sequence[NodeCapacity]
) -> bool:
    return not _mismatch(config, names, nodes)


def _plan(
    config: ResourceConfig, names: Sequence[str], nodes: Sequence[NodeCapacity]
) -> ClusterPlan:
    mismatch = _mismatch(config, names, nodes)
    if mismatch:
        raise ConfigError(
            f"groups {list(names)} cannot be colocated: {mismatch}; make them equal or "
            "put them apart"
        )
    requests = [config.groups[name] for name in names]
    # A smaller group uses the first bundles of each node.
    per_node = max(request.workers_per_node for request in requests)
    return ClusterPlan(
        "+".join(names),
        (per_node,) * requests[0].num_nodes,
        _gpus_of(requests[0], nodes),
        tuple(names),
        requests[0].unified,
        requests[0].bundle_resources,
    )


def _blocks(plan: ClusterPlan, strategy: PlacementStrategy) -> tuple[int, ...]:
    """Return the numbers of bundles that must be together, as Ray will place them."""
    total = sum(plan.bundle_ct_per_node_list)
    if not plan.unified:
        return plan.bundle_ct_per_node_list
    return (total,) if strategy == "STRICT_PACK" else (1,) * total


def _fitted(
    config: ResourceConfig,
    sets: Sequence[Sequence[str]],
    nodes: Sequence[NodeCapacity],
) -> list[ClusterPlan]:
    plans = [_plan(config, names, nodes) for names in sets]
    _check_fit([(plan, config.placement_group_strategy) for plan in plans], nodes)
    return plans


def _check_fit(
    plans: Sequence[tuple[ClusterPlan, PlacementStrategy]],
    nodes: Sequence[NodeCapacity],
) -> None:
    # Each cluster is planned on what the earlier ones leave: all exist at
    # the same time.
    left = list(nodes)
    # GPU clusters first: what has no GPU fits beside them, not the other way round.
    for plan, strategy in sorted(plans, key=lambda each: not each[0].use_gpus):
        beside = ", beside the others," if left != list(nodes) else ""
        what = f"cluster {plan.name!r}{beside}"
        if plan.unified:
            total = sum(plan.bundle_ct_per_node_list)
            check_unified_placement(total, plan.bundle, left, strategy, what=what)
        blocks = _blocks(plan, strategy)
        most = max((node.num_bundles(plan.bundle) for node in left), default=0)
        if plan.unified and strategy == "PACK" and sum(blocks) <= most:
            # Ray spreads them only where no node has room for all.
            blocks = (sum(blocks),)
        chosen = assign_blocks(blocks, plan.bundle, left, what=what)
        for count, node in zip(blocks, chosen, strict=True):
            left[node] = left[node].without(plan.bundle, count)


def check_clusters(
    clusters: Mapping[str, tuple[ClusterSize, Sequence[str]]],
    nodes: Sequence[NodeCapacity],
) -> None:
    """Check that clusters fit on the nodes at the same time.

    One by one they may fit, and the last would wait until its deadline for what the
    others hold. Clusters that may wait for nodes (`min_nodes`, `nodes_deadline_s`) are
    left out.

    Args:
        clusters: size of each and the worker groups that share its bundles, by name.
        nodes: the nodes there are, empty.

    Raises:
        ResourceInsufficientError: they do not fit together.
    """
    plans = []
    for name, (size, groups) in clusters.items():
        if size.min_nodes is not None or size.nodes_deadline_s > 0:
            continue
        request = GroupRequest(
            num_nodes=size.num_nodes,
            workers_per_node=size.workers_per_node,
            use_gpus=size.use_gpus,
        )
        plan = ClusterPlan(
            name,
            (size.workers_per_node,) * size.num_nodes,
            _gpus_of(request, nodes),
            tuple(groups),
            size.unified,
            size.bundle_resources,
        )
        plans.append((plan, size.placement_group_strategy))
    _check_fit(plans, nodes)


class ResourceManager:
    """Makes and holds the clusters that a `ResourceConfig` asks for.

    Nothing is reserved before a cluster's first worker group; leaving the `with` block
    (or `shutdown`) gives everything back.
    """

    def __init__(
        self,
        config: ResourceConfig | Mapping[str, GroupRequest],
        *,
        nodes: Sequence[NodeCapacity] | None = None,
    ) -> None:
        if not isinstance(config, ResourceConfig):
            config = ResourceConfig(groups=dict(config))
        self.config = config
        if nodes is None:
            init_ray(
                tls=config.tls,
                pass_env=config.pass_env,
                deadline_s=config.start_deadline_s,
            )
            nodes = live_nodes()
        self.plans = plan_clusters(config, nodes)
        for plan in self.plans:
            logger.info("cluster %r: %s", plan.name, plan.describe())
        self._clusters: dict[str, RayVirtualCluster] = {}

    def plan_for(self, group: str) -> ClusterPlan:
        """Return the plan of the cluster that a group is on."""
        for plan in self.plans:
            if group in plan.groups:
                return plan
        raise ConfigError(
            f"there is no group {group!r}; the request has {list(self.config.groups)}"
            f"{did_you_mean(group, self.config.groups)}"
        )

    def cluster_for(self, group: str) -> RayVirtualCluster:
        """Return the cluster of a group; colocated groups get the same object."""
        plan = self.plan_for(group)
        if plan.name not in self._clusters:
            self._clusters[plan.name] = RayVirtualCluster(
                plan.bundle_ct_per_node_list,
                use_gpus=plan.use_gpus,
                max_colocated_worker_groups=plan.max_colocated_worker_groups,
                # The plan has been checked against the nodes; the cluster's default
                # must not limit it.
                num_gpus_per_node=max(plan.bundle_ct_per_node_list),
                name=plan.name,
                placement_group_strategy=self.config.placement_group_strategy,
                deadline_s=self.config.placement_deadline_s,
                unified=plan.unified,
                bundle_resources=plan.resources,
                tls=self.config.tls,
            )
        return self._clusters[plan.name]

    def workers_per_node_of(self, group: str) -> int:
        """Bundles of each node that a group uses, for `RayWorkerGroup`."""
        self.plan_for(group)
        return self.config.groups[group].workers_per_node

    def is_colocated(self, *groups: str) -> bool:
        """Whether all these groups share bundles."""
        return len({self.plan_for(group).name for group in groups}) <= 1

    def shutdown(self) -> None:
        """Give all clusters back; may be called more than once."""
        # Emptied first, so that a second call finds none.
        clusters, self._clusters = self._clusters, {}
        for cluster in clusters.values():
            cluster.shutdown()

    def __enter__(self) -> ResourceManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(error, self.shutdown, "the clusters of the resource manager")
