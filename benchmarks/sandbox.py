"""`python -m benchmarks.sandbox [--slots N] [--programs N] [--rounds N]`: executions.

Prints one JSON line with the time until a pool is ready, and one per way of running
small Python programs: with all confinement available on this machine, and without the
network namespace. They take turns, round by round. The peer is an interpreter started
for each program, without any confinement. `load` is the load average of the last
minute, before and after: figures from a busy machine mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rl_envs.sandbox import Program, SandboxPool

PROGRAM = "print(sum(int(x) for x in input().split()))"
INPUT = "1 2 3"
OUTPUT = "6\n"
TARGETS = {"full": 150.0, "without_network_namespace": 400.0}
TARGET_START_S = 1.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--programs", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    starts_s, pools = [], {}
    for name in TARGETS:
        began_s = time.perf_counter()
        pools[name] = SandboxPool(options.slots, network_namespace=name == "full")
        starts_s.append(time.perf_counter() - began_s)
    ways: dict[str, Callable[[int], None]] = {
        "interpreters": lambda size: run_interpreters(size, options.slots),
        **{
            name: lambda size, p=pool: run_pool(p, size) for name, pool in pools.items()
        },
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for way in ways.values():
            way(options.slots)
        for _ in range(options.rounds):
            for name, way in ways.items():
                began_s = time.perf_counter()
                way(options.programs)
                rates[name].append(options.programs / (time.perf_counter() - began_s))
    finally:
        levels = {name: pool.level.name.lower() for name, pool in pools.items()}
        for pool in pools.values():
            pool.close()
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    say(bench="sandbox_start", slots=options.slots, load=load,
        seconds=[round(s, 3) for s in starts_s], target=TARGET_START_S)  # fmt: skip
    peer = statistics.median(rates["interpreters"])
    for name, found in rates.items():
        rate = statistics.median(found)
        say(bench="sandbox_run", way=name, level=levels.get(name, "none"),
            slots=options.slots, load=load, per_s=round(rate, 1),
            slowest_per_s=round(min(found), 1), fastest_per_s=round(max(found), 1),
            ratio=round(rate / peer, 2), target=TARGETS.get(name))  # fmt: skip


def run_pool(pool: SandboxPool, size: int) -> None:
    """Run programs in all slots of a pool, and check their output."""
    results = pool.run_all([Program(PROGRAM, INPUT)] * size)
    assert [result.stdout for result in results] == [OUTPUT] * size


def run_interpreters(size: int, num_slots: int) -> None:
    """Run each program in an interpreter of its own, one per slot at a time."""

    def run(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            input=INPUT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    with ThreadPoolExecutor(num_slots) as threads:
        assert list(threads.map(run, range(size))) == [OUTPUT] * size


def say(**line: object) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
