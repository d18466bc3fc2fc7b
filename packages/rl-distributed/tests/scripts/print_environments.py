"""Print the environment of every process of a cluster, as the kernel reports it.

Arguments: `pass=NAME` for each variable to pass, or the address of a running cluster.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import ray

sys.path.append(str(Path(__file__).parents[1]))

from rl_distributed import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, init_ray


def environment_of(process: psutil.Process) -> dict[str, str]:
    data = Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
    return dict(entry.split("=", 1) for entry in data.split("\0") if "=" in entry)


def kind_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    names = ("gcs_server", "raylet/raylet", "DashboardAgent", "RuntimeEnvAgent")
    for kind in (*names, "ray::"):
        if kind in command:
            return kind
    return "other"


def processes_of(session: str) -> list[psutil.Process]:
    """Return the processes started for a Ray session, and their children."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if session in " ".join(process.cmdline()):
                family = [process, *process.children(recursive=True)]
                found |= {member.pid: member for member in family}
    return [process for pid, process in found.items() if pid != os.getpid()]


def main() -> None:
    options = [text.partition("=") for text in sys.argv[1:]]
    names = [value for key, _, value in options if key == "pass"]
    address = next((key for key, equals, _ in options if not equals), None)
    if address:
        init_ray(address=address, deadline_s=60)
    else:
        init_ray(1, address="local", pass_env=names, deadline_s=120)
    node = ray._private.worker._global_node
    builder = RayWorkerBuilder("rl_distributed_sample_workers.Sample")
    variables = {"DECLARED_TOKEN": "declared-secret", "DECLARED": "plain"}
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, builder, env_vars=variables) as group,
    ):
        reference = group.run_single_worker_single_data("all_env", 0)
        (seen,) = group.get_all_worker_results([reference])
        found = []
        for process in processes_of(node.get_session_dir_path()):
            # Ray stops some of its helpers on its own.
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                kind, environment = kind_of(process), environment_of(process)
                found.append({"kind": kind, "environment": environment})
    session = node.get_session_dir_path()
    result = {"processes": found, "worker": seen, "session": session}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
