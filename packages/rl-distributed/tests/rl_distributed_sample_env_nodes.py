"""Two nodes with folders of their own, and workers of one environment on both.

`python rl_distributed_sample_env_nodes.py WHEELS FOLDER` prints its findings as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ray
from rl_distributed_sample_environments import Scaler, overlay
from rl_distributed_simulated import simulated_nodes

from rl_distributed import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup
from rl_distributed.actor_environments import EnvironmentStore


def main(wheels: str, folder: str) -> None:
    os.environ.pop("RL_ENV_ROOT", None)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/first"
    nodes, _ = simulated_nodes(
        {"num_cpus": 1},
        {"num_cpus": 1, "env_vars": {"XDG_CACHE_HOME": f"{folder}/second"}},
    )
    try:
        nodes.connect()
        environment = overlay(wheels, "2.0", preflight_deadline_s=120)
        builder = RayWorkerBuilder(Scaler).with_options(environment=environment)
        with (
            RayVirtualCluster([1, 1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, builder, start_deadline_s=240) as group,
        ):
            packages = group.get_all_worker_results(
                group.run_all_workers_single_data("packages"), deadline_s=240
            )
        built = {
            name: len(
                EnvironmentStore(Path(folder, name, "rl/environments")).environments()
            )
            for name in ("first", "second")
        }
        prefixes = [prefix for prefix, *_ in packages]
        sys.stdout.write(json.dumps({"built": built, "prefixes": prefixes}) + "\n")
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
