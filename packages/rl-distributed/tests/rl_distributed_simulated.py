"""Simulated nodes: several Ray nodes on this machine."""

from __future__ import annotations

from typing import Any

from ray.cluster_utils import Cluster

from rl_distributed.cluster.ray_processes import only_needed_processes

NODE = {"num_cpus": 1, "include_dashboard": False}
"""A node of one worker."""
QUICK = {
    "health_check_initial_delay_ms": 1_000,
    "health_check_period_ms": 1_000,
    "health_check_failure_threshold": 2,
}
"""`_system_config` of a head that gives up a lost node, and moves its bundles, soon."""


def simulated_nodes(*nodes: dict, attempts: int = 3) -> tuple[Any, list[Any]]:
    """A cluster of several nodes on this machine, each with the given arguments.

    Ray gives each node 30 s to start, too little on a busy machine.
    """
    for attempt in range(attempts):
        cluster = Cluster()
        try:
            with only_needed_processes(log_monitor=False):
                return cluster, [cluster.add_node(**arguments) for arguments in nodes]
        except Exception:
            cluster.shutdown()
            if attempt == attempts - 1:
                raise
    raise AssertionError("unreachable")
