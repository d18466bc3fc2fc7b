"""Ray kills a worker that fills the memory. Prints what its caller is told.

Ray's limit is set just above the current usage, so that little is filled.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil

from rl_distributed import (
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    init_ray,
)
from rl_distributed.errors import WorkerDiedError

# Far less than MOST_MIB is filled, unless another suite frees memory meanwhile.
MARGIN_MIB, MOST_MIB = 500, 8_000


def main() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    memory = psutil.virtual_memory()
    used = memory.total - memory.available + (MARGIN_MIB << 20)
    limits = {
        "RAY_memory_usage_threshold": f"{used / memory.total:.5f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    os.environ.update(limits)
    init_ray(1, object_store_bytes=100 << 20)
    cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=1)
    builder = RayWorkerBuilder("rl_distributed_sample_memory.Eater")
    with cluster, RayWorkerGroup(cluster, builder) as group:
        (pid,) = group.worker_pids
        references = group.run_all_workers_single_data("eat", mib=MOST_MIB)
        try:
            group.get_all_worker_results(references, deadline_s=120)
        except WorkerDiedError as error:
            failure = error.failure
            found = {
                "pid": pid,
                "message": str(error),
                "rank": None if failure is None else failure.rank,
                "is_out_of_memory": failure is not None and failure.is_out_of_memory,
            }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
