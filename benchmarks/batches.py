"""`python -m benchmarks.batches [transport|sharding|transfer ...]`: JSON lines.

- `transport`: put and get of a batch in Ray's object store, against the same tensors
  as a plain dict (Ray's default pickling of torch tensors) and against copying the
  same bytes once within the process, into memory that was touched beforehand.
- `sharding`: 100,000 rows for 8 ranks by dynamic batching and by packing, including
  the selection of all rows, against the plain-Python first-fit-decreasing below, which
  only computes the bins. Also the load balance of the ranks, against round-robin.
- `transfer`: a stream of named tensors over each link that needs no GPU, sender and
  receiver in threads of one process, against copying the same bytes once; and the
  digest alone, against CRC-32 and BLAKE2b.

The sides take turns in one process. `ratio` is our speed-up over the peer (against a
copy: our slowdown, so lower is better).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.alternate import summary

MEGABYTE = 1 << 20
WARMUP_STEPS = 2
RANKS = 8
ROWS, WIDTH, CAPACITY = 100_000, 512, 2048


def main() -> None:
    """Run the named parts."""
    parts: dict[str, Callable[[int], None]] = {
        "transport": transport,
        "sharding": sharding,
        "transfer": transfer,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*parts], metavar="NAME")
    parser.add_argument("--steps", type=int, default=9, help="measured steps per side")
    options = parser.parse_args()
    unknown = set(options.names) - set(parts)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {[*parts]}")
    torch.set_num_threads(1)
    for name in options.names:
        parts[name](options.steps)


def alternate(
    sides: Mapping[str, Callable[[], Any]], steps: int
) -> dict[str, dict[str, float]]:
    """Run all sides in turn and return the summary of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(steps + WARMUP_STEPS):
        for name, run in sides.items():
            began_s = time.perf_counter()
            result = run()
            times[name].append(time.perf_counter() - began_s)
            del result
    return {name: summary(times[name], WARMUP_STEPS) for name in sides}


def report(
    bench: str,
    times: Mapping[str, Mapping[str, float]],
    peer: str,
    target: float | None,
    *,
    at_most: bool = False,
    **more: Any,
) -> None:
    """Print one line; `at_most`: the ratio is ours / peer and must not exceed it."""
    ours, other = times["ours"]["median_s"], times[peer]["median_s"]
    ratio = ours / other if at_most else other / ours
    line = {
        "bench": bench,
        "ours": times["ours"],
        "peer": {"name": peer, **times[peer]},
        "ratio": round(ratio, 2),
        "target": target,
        **more,
    }
    if target is not None:
        reached = ratio <= target if at_most else ratio >= target
        line["verdict"] = "reached" if reached else "missed"
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------- transport


def transport(steps: int) -> None:
    """Measure put and get at three sizes; the targets hold at 256 MB."""
    import ray

    from rl_distributed import BatchedDataDict, init_ray

    init_ray(num_cpus=2)
    pickled, copied = f"ray {ray.__version__} default pickling", "memcpy"
    for megabytes in (1, 16, 256):
        tensors = columns(megabytes * MEGABYTE)
        batch = BatchedDataDict(tensors)
        places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda batch=batch: ray.get(ray.put(batch)),
            pickled: lambda tensors=tensors: ray.get(ray.put(tensors)),
            copied: lambda tensors=tensors, places=places: [
                places[name].copy_(tensor) for name, tensor in tensors.items()
            ],
        }
        times = alternate(sides, steps if megabytes > 16 else 3 * steps)
        large = megabytes == 256
        name = f"batch_put_get_{megabytes}MB"
        report(name, times, pickled, 5.0 if large else None)
        report(name, times, copied, 3.0 if large else None, at_most=True)


def columns(num_bytes: int) -> dict[str, torch.Tensor]:
    """Return tensors of 64 rows with about `num_bytes` in all."""
    unit = num_bytes // 64 // 8
    return {
        "ids": torch.randint(0, 1000, (64, unit // 2)),
        "values": torch.randn(64, unit // 2),
        "mask": torch.ones(64, unit).bool(),
        "states": torch.randn(64, unit // 2).bfloat16(),
    }


# ----------------------------------------------------------------------------- sharding


def sharding(steps: int) -> None:
    """Measure uniform lengths, and the long tail of sampled text."""
    generator = np.random.default_rng(0)
    tail = generator.lognormal(4.5, 0.8, ROWS).astype(np.int64)
    for kind, lengths in (
        ("uniform", generator.integers(1, WIDTH + 1, ROWS)),
        ("lognormal", np.clip(tail, 1, WIDTH)),
    ):
        began_s = time.perf_counter()
        first_fit_decreasing(lengths.tolist(), CAPACITY)
        # It takes so long that once is enough, and nothing needs a warm-up.
        took_s = round(time.perf_counter() - began_s, 4)
        peer = {"median_s": took_s, "q1_s": took_s, "q3_s": took_s, "steps": 1}
        for name in (
            "dynamic",
            "first_fit_decreasing",
            "modified_first_fit_decreasing",
        ):
            measure_sharding(f"{name}_{kind}", name, lengths, peer, steps)


def measure_sharding(
    bench: str, how: str, lengths: Any, peer: dict[str, float], steps: int
) -> None:
    """Measure one way to shard."""
    from rl_distributed import BatchedDataDict
    from rl_distributed.batch.balance import load_imbalance

    batch = BatchedDataDict(
        ids=torch.zeros(ROWS, WIDTH, dtype=torch.int16),
        lengths=torch.from_numpy(lengths),
    )
    common = {
        "max_tokens_per_microbatch": CAPACITY,
        "input_key": "ids",
        "input_lengths_key": "lengths",
    }
    dynamic = {"dynamic_batching_args": {**common, "sequence_length_round": 8}}
    packed = {"algorithm": how, "sequence_length_pad_multiple": 1}
    packing = {"sequence_packing_args": {**common, **packed}}
    args: Any = dynamic if how == "dynamic" else packing
    times = alternate({"ours": lambda: batch.shard_by_batch_size(RANKS, **args)}, steps)
    name = "plain-Python first-fit decreasing"
    shards, _ = batch.shard_by_batch_size(RANKS, **args)
    loads = [int(shard["lengths"].sum()) for shard in shards]
    around = [int(lengths[rank::RANKS].sum()) for rank in range(RANKS)]
    report(
        f"shard_{bench}",
        {**times, name: peer},
        name,
        20.0,
        load_imbalance=round(load_imbalance(loads), 6),
        load_imbalance_round_robin=round(load_imbalance(around), 6),
    )


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put each row, longest first, into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        for place, left in enumerate(room):
            if length <= left:
                bins[place].append(row)
                room[place] = left - length
                break
        else:
            bins.append([row])
            room.append(capacity - length)
    return bins


# ----------------------------------------------------------------------------- transfer


def transfer(steps: int) -> None:
    """Send 256 MB of named tensors over each link; measure the digest's cost."""
    from rl_distributed import init_ray
    from rl_distributed.transfer import (
        CollectiveLink,
        FileLink,
        ObjectStoreLink,
        SharedMemoryLink,
        digest_of,
    )

    init_ray(num_cpus=2)
    tensors = {str(n): torch.randn(1024, 1024) for n in range(64)}
    places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name, link in (
            ("object_store", ObjectStoreLink.create()),
            ("shared_memory", SharedMemoryLink.create()),
            ("collective_gloo", CollectiveLink.local()),
            ("file", FileLink(folder)),
        ):
            with link, ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(link.receiver)
                ends = link.sender(), waiting.result(60)
                sides = {
                    "ours": lambda ends=ends, threads=threads: once(
                        *ends, threads, tensors
                    ),
                    "memcpy": lambda: [
                        places[name].copy_(tensor) for name, tensor in tensors.items()
                    ],
                }
                times = alternate(sides, min(steps, 5))
                report(f"transfer_256MB_{name}", times, "memcpy", None, at_most=True)
    data = torch.randint(0, 256, (64 * MEGABYTE,), dtype=torch.uint8)
    place = torch.zeros_like(data)
    sides = {
        "ours": lambda: digest_of(data),
        "memcpy": lambda: place.copy_(data),
        "crc32": lambda: zlib.crc32(data.numpy().data),
        "blake2b": lambda: hashlib.blake2b(data.numpy().data).digest(),
    }
    times = alternate(sides, steps)
    report("digest_64MB", times, "memcpy", None, at_most=True)
    for peer in ("crc32", "blake2b"):
        report("digest_64MB", times, peer, None)


def once(sender: Any, receiver: Any, threads: Any, tensors: Any) -> None:
    """Run one transfer to its verified end."""
    from rl_distributed.transfer import receive_tensors, send_tensors

    def drain() -> int:
        return sum(1 for _ in receive_tensors(receiver))

    received = threads.submit(drain)
    send_tensors(sender, tensors, bucket_bytes=32 * MEGABYTE)
    if received.result(120) != len(tensors):
        raise AssertionError("tensors are missing")


if __name__ == "__main__":
    main()
