"""Supervision of a worker on another node, whose process is out of reach."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, signal, sys
import psutil, ray
from ray.cluster_utils import Cluster

sys.path.append(sys.argv[1])
nodes = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
)
try:
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    from rl_distributed import (
        RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, RestartWorker, WorkerError
    )

    own = ray.get_runtime_context().get_node_id()
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster, RayWorkerGroup(
        cluster,
        RayWorkerBuilder("rl_distributed_sample_workers.Counter"),
        name_prefix="far",
        failure_policy=RestartWorker(heartbeat_limit_s=4),
    ) as group:
        (far,) = (s.rank for s in group.seats if s.slot.node_id != own)
        told = []
        for number in (signal.SIGSTOP, signal.SIGKILL):
            pid = group.worker_pids[far]
            call = group.run_single_worker_single_data("wait", far)
            os.kill(pid, number)
            try:
                group.get_all_worker_results([call], deadline_s=60)
            except WorkerError as error:
                is_him = error.failure.pid == pid and error.failure.rank == far
                gone = not psutil.pid_exists(pid)
                told.append([type(error).__name__, is_him, gone])
        call = group.run_all_workers_single_data("pid")
        answers = group.get_all_worker_results(call, deadline_s=60)
        print(json.dumps([told, answers == group.worker_pids]))
finally:
    ray.shutdown()
    nodes.shutdown()
"""


@pytest.mark.slow
def test_worker_on_another_node():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    finally:
        # Whatever of the two nodes is left after a failure.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, err
    # Ray may add lines of its own.
    (line,) = (line for line in out.splitlines() if line.startswith("[["))
    told, answered = json.loads(line)
    assert told == [["WorkerHungError", True, True], ["WorkerDiedError", True, True]]
    assert answered
