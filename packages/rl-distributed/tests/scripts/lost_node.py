"""A node is lost and another joins. Prints what a group with a worker there does."""

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

import psutil
import ray
from rl_distributed_simulated import NODE, QUICK, simulated_nodes

from rl_distributed import (
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartWorker,
    init_ray,
)
from rl_distributed.errors import WorkerError

DEADLINE_S = 60.0


def outcome(group, references) -> list:
    try:
        return ["ok", group.get_all_worker_results(references, deadline_s=DEADLINE_S)]
    except WorkerError as error:
        return [type(error).__name__, str(error), error.failure.rank]


def call(group) -> list:
    try:
        references = group.run_all_workers_single_data("pid")
    except WorkerError as error:
        return [type(error).__name__, str(error), error.failure.rank]
    return outcome(group, references)


def lose(group, nodes, found) -> None:
    own = ray.get_runtime_context().get_node_id()
    (seat,) = [seat for seat in group.seats if seat.slot.node_id != own]
    (node,) = [node for node in nodes if node.node_id == seat.slot.node_id]
    pid = group.worker_pids[seat.rank]
    waiting = group.run_single_worker_single_data("wait", seat.rank)
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    found["rank"] = seat.rank
    found["first"] = outcome(group, [waiting])
    found["dead"] = [worker.state for worker in group.health()][seat.rank]
    # Its process happens to be on this machine: it learns that it was given up.
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(pid)], DEADLINE_S)
    found["old_is_gone"] = not psutil.pid_exists(pid)


def main() -> None:
    cluster, nodes = simulated_nodes({**NODE, "_system_config": QUICK}, NODE)
    found: dict = {}
    try:
        init_ray(address=cluster.address, deadline_s=60)
        builder = RayWorkerBuilder("rl_distributed_sample_workers.Counter")
        policy = RestartWorker(max_restarts=1, resources_deadline_s=2.0)
        with (
            RayVirtualCluster([1, 1], use_gpus=False) as virtual,
            RayWorkerGroup(
                virtual, builder, name_prefix="far", failure_policy=policy
            ) as group,
        ):
            before = {seat.slot.node_id for seat in group.seats}
            lose(group, nodes, found)
            found["without_room"] = [call(group), call(group)]
            cluster.add_node(**NODE)
            end = time.monotonic() + DEADLINE_S
            while (last := call(group))[0] != "ok" and time.monotonic() < end:
                threading.Event().wait(0.1)
            found["with_room"] = last
            found["pids"] = group.worker_pids
            found["restarts"] = [worker.num_restarts for worker in group.health()]
            found["new_nodes"] = len(
                {seat.slot.node_id for seat in group.seats} - before
            )
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
