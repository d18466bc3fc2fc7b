"""Try to join a cluster and print the outcome.

Arguments: the address; then `tls=FOLDER`, `ray=VERSION` or `deadline=SECONDS`.
"""

from __future__ import annotations

import json
import sys

import ray

from rl_distributed import init_ray
from rl_distributed.errors import DistributedError
from rl_distributed.security.tls_files import TlsFiles


@ray.remote(num_cpus=0)
class Doubler:
    def double(self, value):
        return 2 * value


def main() -> None:
    address, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    if "ray" in given:
        ray.__version__ = given["ray"]
    tls = TlsFiles.in_folder(given["tls"]) if "tls" in given else False
    found: dict = {"error": "", "message": ""}
    try:
        init_ray(
            address=address, tls=tls, deadline_s=float(given.get("deadline", "60"))
        )
    except DistributedError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    else:
        actor = Doubler.remote()
        found["answer"] = ray.get(actor.double.remote(21), timeout=60)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
