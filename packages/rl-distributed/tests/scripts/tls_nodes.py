"""Two simulated nodes under TLS with a worker on each. Prints its findings."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = "0123456789abcdef0123456789abcdef"
sys.path.append(str(Path(__file__).parents[1]))

import ray
from rl_distributed_simulated import simulated_nodes

from rl_distributed import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, init_ray
from rl_distributed.cluster.attach import ClusterAddress
from rl_distributed.security.ray_access import create_certificates, tls_in_use, use_tls


def listeners_without_tls(address: ClusterAddress) -> bool:
    """Return whether the head answers an unencrypted client."""
    with socket.create_connection((address.host, address.port), 10) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        try:
            return b"\x00\x00" in link.recv(3)
        except OSError:
            return False


def main() -> None:
    files = create_certificates(sys.argv[1])
    use_tls(files)
    found: dict = {"in_use": tls_in_use() == files}
    began = time.monotonic()
    node = {"num_cpus": 1, "include_dashboard": False}
    cluster, _ = simulated_nodes(node, node)
    found["cluster_s"] = time.monotonic() - began
    try:
        began = time.monotonic()
        init_ray(address=cluster.address, deadline_s=60)
        found["attach_s"] = time.monotonic() - began
        found["plain"] = listeners_without_tls(ClusterAddress.parse(cluster.address))
        with RayVirtualCluster([1, 1], use_gpus=False) as virtual:
            builder = RayWorkerBuilder("rl_distributed_sample_places.Place", base=1)
            with RayWorkerGroup(virtual, builder) as group:
                found["nodes"] = len({seat.slot.node_id for seat in group.seats})
                found["answers"] = group.get_all_worker_results(
                    group.run_all_workers_single_data("add", value=1)
                )
                found["worker_tls"] = group.get_all_worker_results(
                    group.run_all_workers_single_data("env", names=["RAY_USE_TLS"])
                )
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
