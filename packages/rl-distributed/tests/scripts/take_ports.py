"""Take ports as one of several programs, and hold them until standard input closes.

Arguments: registry folder, number of rounds, ports per round, first port, end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rl_distributed.cluster.ports import reserve_ports


def main() -> None:
    folder, *numbers = sys.argv[1:]
    rounds, count, low, high = map(int, numbers)
    ports: list[int] = []
    for _ in range(rounds):
        ports += reserve_ports(count, low, high, registry=Path(folder), deadline_s=100)
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
