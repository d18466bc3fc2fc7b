"""Three simulated nodes: placement, order, groups and ports. Prints its findings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = "0123456789abcdef0123456789abcdef"
sys.path.append(str(Path(__file__).parents[1]))

import psutil
import ray
from rl_distributed_simulated import simulated_nodes

from rl_distributed import (
    ClusterConfig,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    ResourceManager,
    RestartWorker,
    init_ray,
)
from rl_distributed.cluster.resources import GroupRequest, ResourceConfig
from rl_distributed.errors import DistributedError, WorkerError

# The driver's node is in another domain than the two adjacent ones.
NODES = [("apart", {}), ("joined", {"probe": 1}), ("joined", {"probe": 1})]
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def refusal(cluster, **how):
    # A wait for resources would end in another error.
    try:
        cluster.place(**how)
    except DistributedError as error:
        return type(error).__name__, str(error)
    finally:
        cluster.shutdown()
    return "", ""


def placed(counts, *, unified=False, strategy=None, **options):
    with RayVirtualCluster(counts, **options) as cluster:
        cluster.place(unified=unified, strategy=strategy)
        return [[slot.node_id for slot in row] for row in cluster.slots()]


def per_node(found):
    with RayVirtualCluster([2, 2], use_gpus=True) as cluster:
        slots = [slot for row in cluster.slots() for slot in row]
        found["two_nodes"] = [[slot.node_id, slot.nvlink_domain] for slot in slots]
    found["three_nodes"] = placed([2, 2, 2], use_gpus=True)
    found["cpu_only"] = placed([2, 2, 2], use_gpus=False)
    found["with_resource"] = placed([1, 1], bundle_resources={"probe": 1})
    config = ClusterConfig(num_nodes=3, workers_per_node=1)
    found["from_config"] = RayVirtualCluster.from_config(config).use_gpus


def unified(found):
    sizes = {"PACK": 5, "SPREAD": 3, "STRICT_PACK": 2, "STRICT_SPREAD": 3}
    found["unified"] = {
        strategy: placed([sizes[strategy]], unified=True, strategy=strategy)[0]
        for strategy in STRATEGIES
    }


def refused(found):
    found["refused"] = {
        "per_node": refusal(RayVirtualCluster([8, 8], use_gpus=True)),
        "too_many": refusal(RayVirtualCluster([2, 2, 2, 2], use_gpus=True)),
        "resource": refusal(RayVirtualCluster([1] * 3, bundle_resources={"probe": 1})),
        "unknown": refusal(RayVirtualCluster([1], bundle_resources={"prob": 1})),
    } | {
        strategy: refusal(
            RayVirtualCluster([count], use_gpus=True), unified=True, strategy=strategy
        )
        for strategy, count in zip(STRATEGIES, (7, 7, 3, 4), strict=True)
    }


def model_parallel(found):
    """Two tied groups of three workers over three nodes with two GPUs each."""
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"]
    with RayVirtualCluster([2, 2, 2], use_gpus=True) as cluster:
        cluster.place(unified=True)
        tied = cluster.tied_bundles(3)
        builder = RayWorkerBuilder("rl_distributed_sample_places.Place")
        with RayWorkerGroup(cluster, builder, bundle_indices_list=tied) as group:
            found["tied_groups"] = group.dp_size
            found["tied_nodes"] = [seat.slot.node_id for seat in group.seats]
            found["tied_env"] = group.get_all_worker_results(
                group.run_all_workers_single_data("env", names=names)
            )


def collective_over_nodes(found):
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster:
        builder = RayWorkerBuilder("rl_distributed_sample_collectives.Rendezvous")
        with RayWorkerGroup(cluster, builder) as group:
            found["all_reduce"] = group.get_all_worker_results(
                group.run_all_workers_multiple_data("total", value=[1, 2])
            )


def colocated_in_turn(found):
    request = ResourceConfig(
        groups={name: GroupRequest(num_nodes=2) for name in ("one", "other")},
        placement="colocated",
    )
    answers = []
    with ResourceManager(request) as manager:
        builder = RayWorkerBuilder("rl_distributed_sample_places.Place", base=1)
        groups = [
            RayWorkerGroup(manager.cluster_for(n), builder) for n in ("one", "other")
        ]
        for _ in range(2):
            for group in groups:
                answers += group.get_all_worker_results(
                    group.run_all_workers_single_data("add", value=1)
                )
        for group in groups:
            group.shutdown()
        found["colocated"] = [answers, manager.is_colocated("one", "other")]


def ends(pid):
    """Return whether a process exits; its node notices in its own time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(pid)], timeout=60)
    return not psutil.pid_exists(pid)


def far_worker(found):
    """Stop a worker on another node, then kill it; its process is out of reach."""
    own = ray.get_runtime_context().get_node_id()
    found["far_failures"] = []
    with (
        RayVirtualCluster([1, 1, 1], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder("rl_distributed_sample_workers.Counter"),
            name_prefix="far",
            failure_policy=RestartWorker(heartbeat_limit_s=4),
        ) as group,
    ):
        far = max(s.rank for s in group.seats if s.slot.node_id != own)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            pid = group.worker_pids[far]
            call = group.run_single_worker_single_data("wait", far)
            os.kill(pid, number)
            try:
                group.get_all_worker_results([call], deadline_s=60)
            except WorkerError as error:
                is_him = error.failure.pid == pid and error.failure.rank == far
                found["far_failures"].append([type(error).__name__, is_him, ends(pid)])
        call = group.run_all_workers_single_data("pid")
        answers = group.get_all_worker_results(call, deadline_s=60)
        found["far_group_answers"] = answers == group.worker_pids


def ports(found):
    with RayVirtualCluster([1, 1, 1], use_gpus=False) as cluster:
        pairs = [
            (row[0].placement_group_index, row[0].bundle_index)
            for row in cluster.slots()
        ]
        many = cluster.get_available_addresses_and_ports_batch(pairs * 5)
        found["ports"] = [port for _, port in many]


def lost_node(found, cluster, node):
    cluster.remove_node(node)
    found["after_loss"] = refusal(RayVirtualCluster([2, 2, 2], use_gpus=True))


def main() -> None:
    common = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    cluster, nodes = simulated_nodes(
        *(
            {**common, "labels": {"rl/nvlink-domain": domain}, "resources": resources}
            for domain, resources in NODES
        )
    )
    found: dict = {}
    try:
        found["started"] = init_ray(address=cluster.address, deadline_s=60)
        for step in (
            per_node,
            unified,
            refused,
            model_parallel,
            collective_over_nodes,
            colocated_in_turn,
            far_worker,
            ports,
        ):
            began = time.monotonic()
            step(found)
            sys.stderr.write(f"{step.__name__}: {time.monotonic() - began:.1f} s\n")
        lost_node(found, cluster, nodes[-1])
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
