"""Start a local cluster, print its address, and hold it until standard input closes.

Arguments: a folder with certificates for TLS, or nothing.
"""

from __future__ import annotations

import sys
import time

import ray

from rl_distributed import init_ray
from rl_distributed.security.tls_files import TlsFiles


def main() -> None:
    tls = TlsFiles.in_folder(sys.argv[1]) if sys.argv[1:] else False
    began = time.monotonic()
    init_ray(1, address="local", tls=tls, deadline_s=120)
    sys.stderr.write(f"started in {time.monotonic() - began:.1f} s\n")
    sys.stdout.write(ray.get_runtime_context().gcs_address + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
