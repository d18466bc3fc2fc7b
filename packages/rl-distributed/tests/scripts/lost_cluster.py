"""Kill a process of Ray itself; print what a worker group does then.

Arguments: `gcs_server` or `raylet`; then the address of a cluster to join, and the pid
of its process, where that is not a cluster of this program. `uncaught`: end with the
error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import psutil
from ray._private import worker as ray_worker

from rl_distributed import (
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartWorker,
    init_ray,
)
from rl_distributed.cluster.start import shutdown_ray
from rl_distributed.cluster.watch import (
    ClusterWatch,
    find_loss,
    raise_if_lost,
)
from rl_distributed.errors import ClusterLostError
from rl_distributed.failures.cluster_loss import ClusterLoss

DEADLINE_S = 120.0


def error_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except ClusterLostError as error:
        return str(error) if error.loss is find_loss() else "another loss"
    return ""


def main() -> None:
    name, *joined = sys.argv[1:]
    is_uncaught = "uncaught" in joined
    joined = [word for word in joined if word != "uncaught"]
    init_ray(2, address="local") if not joined else init_ray(address=joined[0])
    if joined:
        pid = int(joined[1])
    else:
        pid = ray_worker._global_node.all_processes[name][0].process.pid
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=1)
    policy = RestartWorker(retry_calls=["pid"])
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder("rl_distributed_sample_workers.Sample"),
        failure_policy=policy,
    )
    workers = [psutil.Process(number) for number in group.worker_pids]
    assert find_loss() is None
    told: queue.Queue[ClusterLoss] = queue.Queue()
    with ClusterWatch(told.put):
        references = (
            group.run_all_workers_single_data("wait") if name == "raylet" else []
        )
        os.kill(pid, signal.SIGKILL)
        loss = told.get(timeout=DEADLINE_S)
        if is_uncaught:
            raise_if_lost(at_once=True)
        found = {"process": loss.process, "pid": loss.pid, "killed": pid}
        found["loss"] = str(loss)
        if loss.workers_answer:
            references = group.run_all_workers_single_data("add", value=5)
            found["answers"] = group.get_all_worker_results(
                references, deadline_s=DEADLINE_S
            )
            references = group.run_all_workers_single_data("wait")
        found["error"] = error_of(group.get_all_worker_results, references)
        # Without its node process it may have exited earlier.
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.worker_pids[0], signal.SIGKILL)
        found["restart"] = error_of(call, group)
        group.shutdown()
        cluster.shutdown()
        shutdown_ray()
        found["left"] = [process.pid for process in workers if is_running(process)]
        assert find_loss() is None
        assert told.empty()
    sys.stdout.write(json.dumps(found) + "\n")


def call(group) -> None:
    group.get_all_worker_results(
        group.run_all_workers_single_data("pid"), deadline_s=DEADLINE_S
    )


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
