"""A local cluster with `tls=True`, after Ray was imported. Prints its findings."""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import ray

from rl_distributed import init_ray
from rl_distributed.cluster.attach import ClusterAddress
from rl_distributed.cluster.start import live_nodes, shutdown_ray


@ray.remote(num_cpus=0)
class Doubler:
    def double(self, value):
        return 2 * value


def main() -> None:
    found: dict = {}
    began = time.monotonic()
    init_ray(1, address="local", tls=True, deadline_s=120)
    found["start_s"] = time.monotonic() - began
    found["token"] = os.environ.get("RAY_AUTH_MODE")
    head = ClusterAddress.parse(ray.get_runtime_context().gcs_address)
    with socket.create_connection((head.host, head.port), 10) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        try:
            found["plain"] = link.recv(3).startswith(b"\x00\x00")
        except OSError:
            found["plain"] = False
    actor = Doubler.remote()
    found["answer"] = ray.get(actor.double.remote(21), timeout=60)
    found["domain"] = live_nodes()[0].nvlink_domain
    shutdown_ray()
    shutdown_ray()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
