"""Nodes are to come, are lost, and come again. Prints what groups and a pool do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = "0123456789abcdef0123456789abcdef"
sys.path.append(str(Path(__file__).parents[1]))

import ray
from ray.util.placement_group import placement_group_table
from rl_distributed_sample_workers import Sample
from rl_distributed_simulated import NODE, QUICK, simulated_nodes

from rl_distributed import (
    RayVirtualCluster,
    RayWorkerGroup,
    RestartWorker,
    WorkerPool,
    init_ray,
)
from rl_distributed.errors import DistributedError

STRICT = (
    RestartWorker(on_node_lost="fail"),
    RestartWorker(on_node_lost="shrink", min_workers=2, resources_deadline_s=1.0),
)
DEADLINE_S = 60.0


def outcome(function) -> list:
    try:
        return ["ok", function()]
    except DistributedError as error:
        return [type(error).__name__, str(error)]


def wait_until(condition) -> bool:
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not (found := condition()) and time.monotonic() < end:
        pause.wait(0.1)
    return bool(found)


def pool_pids(pool) -> list:
    """The processes that take part while four tasks need one another's time."""
    return sorted({result.get() for result in pool.map(Sample.pid_after, [0.3] * 4)})


def without_room(found) -> None:
    """A cluster that needs two nodes where one is there."""
    with RayVirtualCluster([1, 1], use_gpus=False, name="early") as refused:
        found["refused"] = outcome(refused.get_placement_groups)
        found["waited"] = outcome(lambda: refused.place(nodes_deadline_s=0.5))


def main() -> None:
    nodes = simulated_nodes({**NODE, "_system_config": QUICK})
    cluster = nodes[0]
    found: dict = {}
    try:
        init_ray(address=cluster.address, deadline_s=60)
        own = ray.get_runtime_context().get_node_id()
        without_room(found)
        with RayVirtualCluster(
            [1, 1], use_gpus=False, max_colocated_worker_groups=4, name="grows"
        ) as virtual:
            virtual.place(min_nodes=1)
            found["slots"] = [
                [s.node_id == own for s in row] for row in virtual.slots()
            ]
            found["asked_for"] = sorted(
                placement_group_table(group)["state"]
                for group in virtual.get_placement_groups()
            )
            found["rigid"] = outcome(lambda: RayWorkerGroup(virtual, Sample))
            policy = RestartWorker(on_node_lost="shrink", resources_deadline_s=1.0)
            with (
                contextlib.ExitStack() as closing,
                WorkerPool(virtual, Sample, name="pool") as pool,
                RayWorkerGroup(
                    virtual, Sample, name_prefix="group", failure_policy=policy
                ) as group,
            ):
                found["live_at_start"] = group.live_ranks
                found["call_all"] = outcome(lambda: group.all.rank().result())
                found["call_one"] = outcome(lambda: group[0].rank().result())
                found["pool_at_start"] = len(pool_pids(pool))
                second = cluster.add_node(**NODE)
                found["grown"] = wait_until(lambda: len(pool_pids(pool)) == 2)
                found["group_grown"] = wait_until(
                    lambda: outcome(lambda: group.all.rank().result())[0] == "ok"
                )
                found["restarts"] = [worker.num_restarts for worker in group.health()]
                firm, few = (
                    closing.enter_context(
                        RayWorkerGroup(virtual, Sample, failure_policy=strict)
                    )
                    for strict in STRICT
                )
                far = group.worker_pids[1]
                raylet = second.all_processes["raylet"][0].process.pid
                os.kill(raylet, signal.SIGKILL)
                found["shrunk"] = wait_until(lambda: group.live_ranks == [0])
                found["far_call"] = outcome(lambda: group[1].rank().result())
                found["near_call"] = outcome(lambda: group[0].rank().result())
                found["pool_shrunk"] = len(pool_pids(pool))
                found["without"] = group.ranks_without_node()
                found["fail"] = outcome(lambda: firm[0].rank().result())
                found["few"] = outcome(lambda: few[0].rank().result())
                cluster.add_node(**NODE)
                found["group_back"] = wait_until(
                    lambda: outcome(lambda: group.all.rank().result())[0] == "ok"
                )
                found["pool_back"] = wait_until(lambda: len(pool_pids(pool)) == 2)
                found["replaced"] = group.worker_pids[1] != far
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
