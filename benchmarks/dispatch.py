"""`python -m benchmarks.dispatch [--actors 2,16,64] [--rounds N] [--fake]`: overhead.

Two questions, one JSON line per answer:

- What does a call of a worker group cost compared with raw Ray calls of the same
  actors, with the same payload and one `ray.get` for all results? Both sides take
  turns, call by call, in one process; the medians are compared.
- What does a call cost the controller itself as the number of workers grows? Workers
  are plain objects there, so that neither Ray nor processes are measured.

`plain` is another peer, for orientation: Ray actors of the class itself, without our
host. They double the number of processes, so they are measured only on request
(`--plain`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from rl_distributed import (
    NamedSharding,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    init_ray,
)
from rl_distributed.workers.calls import CallSender
from rl_distributed.workers.policy import FailFast

TARGET = 1.15
PAYLOAD = 256
FAKE_SIZES = (2, 8, 32, 128, 512, 1024)
LIMITS_S = (0.01, 0.1)


class Echo:
    """A worker whose method costs nothing."""

    def echo(self, data: Any = None, scale: float = 1.0) -> Any:
        del scale
        return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", default="2,16,64")
    parser.add_argument("--rounds", type=int, default=60, help="calls per side")
    parser.add_argument("--plain", action="store_true", help="plain actors as well")
    parser.add_argument("--fake", action="store_true", help="the controller only")
    options = parser.parse_args()
    if not options.fake:
        sizes = [int(size) for size in options.actors.split(",")]
        # For Ray only: the actors are mostly idle and need no core each.
        init_ray(num_cpus=max(sizes))
        for size in sizes:
            for line in real(size, options.rounds, options.plain):
                show(line)
    for kind in ("single_data", "sharded_data"):
        show(controller(kind, options.rounds))


def show(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def real(size: int, rounds: int, plain: bool) -> list[dict[str, Any]]:
    """Compare group calls with raw calls of the same actors."""
    cluster = RayVirtualCluster([size], use_gpus=False)
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(Echo),
        name_prefix="echo",
        sharding_annotations=NamedSharding(np.arange(size), ["data"]),
        start_deadline_s=600,
    )
    actors = []
    if plain:
        remote = ray.remote(num_cpus=0)(Echo)
        actors = [remote.remote() for _ in range(size)]
    try:
        return [compare(kind, group, actors, rounds) for kind in KINDS]
    finally:
        for actor in actors:
            ray.kill(actor)
        group.shutdown(force=True)
        cluster.shutdown()


def single_data(group: RayWorkerGroup, rows: list[Any]) -> Any:
    return group.run_all_workers_single_data("echo", data=rows[0], scale=2.0)


def sharded_data(group: RayWorkerGroup, rows: list[Any]) -> Any:
    return group.run_all_workers_sharded_data(
        "echo", data=rows, in_sharded_axes=["data"], common_kwargs={"scale": 2.0}
    )


KINDS: dict[str, Callable[[RayWorkerGroup, list[Any]], Any]] = {
    "single_data": single_data,
    "sharded_data": sharded_data,
}


def payload(kind: str, size: int) -> list[Any]:
    """Return each worker's input: the same text, or an array of its own."""
    if kind == "single_data":
        return ["x" * PAYLOAD] * size
    return list(np.arange(size * PAYLOAD, dtype=np.float32).reshape(size, PAYLOAD))


def compare(
    kind: str, group: RayWorkerGroup, actors: list[Any], rounds: int
) -> dict[str, Any]:
    handles = group.workers
    rows = payload(kind, len(handles))

    def ours() -> None:
        group.get_all_worker_results(KINDS[kind](group, rows))

    def raw() -> None:
        references = [
            handle.call.remote("echo", data=row, scale=2.0)
            for handle, row in zip(handles, rows, strict=True)
        ]
        ray.get(references)

    def bare() -> None:
        references = [
            actor.echo.remote(data=row, scale=2.0)
            for actor, row in zip(actors, rows, strict=True)
        ]
        ray.get(references)

    sides = {"ours": ours, "raw": raw} | ({"plain": bare} if actors else {})
    times = alternate(sides, rounds)
    medians = {side: statistics.median(times[side]) for side in times}
    ratio = medians["ours"] / medians["raw"]
    line: dict[str, Any] = {
        "bench": f"dispatch_{kind}",
        "actors": len(handles),
        "rounds": rounds,
        "ratio": round(ratio, 3),
        "target": TARGET,
        "verdict": "reached" if ratio <= TARGET else "missed",
    }
    line |= {f"{side}_median_ms": round(m * 1e3, 3) for side, m in medians.items()}
    if actors:
        line["ratio_plain"] = round(medians["ours"] / medians["plain"], 3)
    return line


def alternate(
    sides: dict[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    """Alternate between the sides; each begins equally often."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    names = list(sides)
    for number in range(rounds + 5):
        for side in names:
            begin = time.perf_counter()
            sides[side]()
            if number >= 5:
                times[side].append(time.perf_counter() - begin)
        names.append(names.pop(0))
    return times


class FakeMethod:
    """Takes a call as Ray's would, and does nothing."""

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return None


class FakeGroup(RayWorkerGroup):
    """The calls of a group whose workers are plain objects."""

    def __init__(self, size: int) -> None:
        method = FakeMethod()
        handle = SimpleNamespace(call=method, call_packed=method, stream=method)
        self.name = "fake"
        self.sharding_annotations = NamedSharding(np.arange(size), ["data"])
        supervisor: Any = SimpleNamespace(incident=None, policy=FailFast())
        self.supervisor = supervisor
        self._workers: Any = [SimpleNamespace(handle=handle)] * size
        description: Any = SimpleNamespace(
            methods=frozenset({"echo"}),
            generator_methods=frozenset(),
            has_dynamic_methods=False,
        )
        self._sender = CallSender(
            self.name,
            self._workers,
            description,
            supervisor,
            self.sharding_annotations,
        )


def controller(kind: str, rounds: int) -> dict[str, Any]:
    """Measure a dispatch without Ray: its cost, its linear fit, and when it matters."""
    medians = []
    for size in FAKE_SIZES:
        group, rows = FakeGroup(size), payload(kind, size)
        KINDS[kind](group, rows)
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            KINDS[kind](group, rows)
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times))
    slope, start = np.polyfit(FAKE_SIZES, medians, 1)
    # 1 if cost grows linearly with the number of workers, 2 if quadratically.
    exponent = np.polyfit(np.log(FAKE_SIZES[2:]), np.log(medians[2:]), 1)[0]
    return {
        "bench": f"controller_{kind}",
        "us_per_call": {
            size: round(median * 1e6, 1)
            for size, median in zip(FAKE_SIZES, medians, strict=True)
        },
        "us_per_worker": round(slope * 1e6, 3),
        "us_fixed": round(start * 1e6, 1),
        "growth_exponent": round(float(exponent), 3),
        "verdict": "linear" if exponent < 1.15 else "not linear",
        "workers_at": {
            f"{limit * 1e3:g}_ms": int((limit - start) / slope) for limit in LIMITS_S
        },
    }


if __name__ == "__main__":
    main()
