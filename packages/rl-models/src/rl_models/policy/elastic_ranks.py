"""`ElasticRanks`: how many ranks train while nodes are lost or still to come.

Ranks hold parts of one model, so that their number changes only when all of them are
started again: with the layout that fits the bundles that have a node.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.cluster.watch import raise_if_lost
from rl_distributed.errors import ConfigError, WorkerStartError
from rl_distributed.logs.logging import get_logger
from rl_distributed.workers.policy import OnNodeLost
from rl_distributed.workers.room import bundles_with_node
from rl_models.config import PolicyConfig
from rl_models.policy.preflight import check_policy

__all__ = ["ElasticRanks", "most_ranks", "with_ranks"]

_logger = get_logger(__name__)
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class ElasticRanks:
    """What a training policy does if not all of its bundles have a node."""

    on_node_lost: OnNodeLost = "wait"
    """`wait` for all of them; `shrink`: train on those there are, with as many ranks as
    the layout allows; `fail`: raise at once."""
    min_ranks: int = 1
    """Smallest number of ranks that `shrink` starts; with room for fewer, it waits."""
    deadline_s: float = 300.0
    """How long to wait for nodes."""

    def bundles(
        self, cluster: RayVirtualCluster, config: PolicyConfig
    ) -> list[tuple[int, int]]:
        """Return the bundles to start ranks on, waiting for nodes if need be.

        Args:
            cluster: Where the ranks run.
            config: Its layout says which numbers of ranks are possible.

        Raises:
            WorkerStartError: Too few bundles had a node in time.
        """
        end = time.monotonic() + self.deadline_s
        wanted = cluster.world_size()
        pause = threading.Event()
        was_told = False
        while True:
            placed = bundles_with_node(cluster)
            num_ranks = most_ranks(config, len(placed))
            least = self.min_ranks if self.on_node_lost == "shrink" else wanted
            if num_ranks >= least:
                return placed[:num_ranks]
            raise_if_lost(at_once=True)
            found = f"nodes for {len(placed)} of {wanted} ranks"
            is_short = self.on_node_lost == "fail"
            if is_short or time.monotonic() > end:
                waited = "no wait" if is_short else f"waited {self.deadline_s:g} s"
                raise WorkerStartError(
                    f"cluster {cluster.name!r} has {found}, and {least} are needed "
                    f"(on_node_lost={self.on_node_lost}, {waited}); add nodes, then "
                    "resume the run"
                )
            if not was_told:
                was_told = True
                _logger.warning(
                    "training waits up to %g s for nodes: there are %s",
                    *(self.deadline_s, found),
                )
            pause.wait(_LOOK_S)

    def can_grow(
        self, cluster: RayVirtualCluster, config: PolicyConfig, num_ranks: int
    ) -> bool:
        """Return whether more ranks could train now than do."""
        if num_ranks >= cluster.world_size():
            return False
        return most_ranks(config, len(bundles_with_node(cluster))) > num_ranks


def most_ranks(config: PolicyConfig, available: int) -> int:
    """Return the largest number of ranks that a layout can have; 0 if there is none.

    Args:
        config: Its `parallelism` with `data` left open.
        available: Bundles that have a node.
    """
    for num_ranks in range(available, 0, -1):
        try:
            check_policy(with_ranks(config, num_ranks), num_ranks)
        except ConfigError:
            continue
        return num_ranks
    return 0


def with_ranks(config: PolicyConfig, num_ranks: int) -> PolicyConfig:
    """Return the same config for another number of ranks: `data` follows from it."""
    layout = config.parallelism
    if layout.data is None or layout.data * layout.model_size == num_ranks:
        return config
    return config.replace(parallelism=layout.replace(data=None))
