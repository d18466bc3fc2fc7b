"""`python -m benchmarks.weight_sync_memory`: what a weight sync costs each rank.

Two training ranks share a model in each layout in turn, and send it to one replica, in
two ways: each tensor is collected on the rank that sends it (`sender`), or every rank
gathers it and rank 0 sends all, as backends without `sharded_weights` do (`all`). One
JSON line per layout and way:

- `growth_mb`: peak growth of each rank's resident memory during the first sync, which
  touches all memory that later ones reuse, and `ratio` the largest of them over the
  size of the model. A rank that gathered the whole model would have 1;
- `received_mb`: bytes that each rank received over its sockets in one sync;
- `sync_ms`: median of syncs in which both ways take turns.

Weights and generator are in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import stat
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rl_distributed.cluster.start import init_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models import (
    GenerationConfig,
    GenerationPolicy,
    PolicyConfig,
    TrainingPolicy,
    WeightSyncConfig,
    WeightSynchronizer,
)
from rl_models.testing import build_tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"parallelism": {"data": 2}},
    "tensor": {"parallelism": {"tensor": 2}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "expert": {"parallelism": {"expert": 2}},
    "megatron-tensor": {"backend": "megatron", "parallelism": {"tensor": 2}},
    "megatron-pipeline": {"backend": "megatron", "parallelism": {"pipeline": 2}},
    "megatron-expert": {"backend": "megatron", "parallelism": {"expert": 2}},
}
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
DEADLINE_S = 120.0
WAYS = ("sender", "all")
SYNCS_PER_TURN = 3
# `TCP_INFO` of Linux, and `tcpi_bytes_received` in its structure.
TCP_INFO, BYTES_RECEIVED_AT = 11, 128


def main() -> None:
    """Measure all layouts, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--bucket-mb", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1, help="factor of the layers")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both ways")
    options = parser.parse_args()
    init_ray(num_cpus=4)
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder), options.depth)
        for layout in options.layouts:
            model = models["expert" if "expert" in layout else "dense"]
            for line in measure(layout, model, options):
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


def make_models(folder: Path, depth: int) -> dict[str, Path]:
    """Write a dense model and a mixture, both with many layers."""
    dense = Qwen2Config(**SHAPE, intermediate_size=1536, num_hidden_layers=16 * depth)
    experts = Qwen3MoeConfig(
        **SHAPE,
        head_dim=64,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=12 * depth,
    )
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(folder / "tiny"))
    made = {"dense": folder / "dense", "expert": folder / "expert"}
    for config, path in zip((dense, experts), made.values(), strict=True):
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return made


def measure(
    layout: str, model: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Sync one layout in both ways; yield the cost of each to the ranks."""
    largest, total = sizes(model)
    growth: dict[str, list[int]] = {}
    for way in reversed(WAYS):
        with workers(layout, model, options) as (policy, sync):
            switch(policy, way)
            before = on_ranks(policy, begin)
            sync.sync_weights()
            peaks = on_ranks(policy, peak)
            growth[way] = [a - b for a, b in zip(peaks, before, strict=True)]
            if way == WAYS[0]:
                times, received = in_turns(policy, sync, options.rounds)
    for way in WAYS:
        yield {
            "bench": "weight_sync_memory",
            "layout": layout,
            "way": way,
            "model_mb": round(total / 2**20, 1),
            "largest_tensor_mb": round(largest / 2**20, 1),
            "bucket_mb": options.bucket_mb,
            "growth_mb": [round(each / 1024, 1) for each in growth[way]],
            "ratio": round(max(growth[way]) * 1024 / total, 3),
            "received_mb": [round(each / 2**20, 1) for each in received[way]],
            "sync_ms": round(1e3 * statistics.median(times[way]), 1),
        }


@contextmanager
def workers(
    layout: str, model: Path, options: argparse.Namespace
) -> Iterator[tuple[TrainingPolicy, WeightSynchronizer]]:
    """Start two ranks of a layout and a replica."""
    config = PolicyConfig.from_dict({"model_name": str(model), **LAYOUTS[layout]})
    settings = WeightSyncConfig.from_dict(
        {
            "transport": "shared_memory",
            "bucket_bytes": options.bucket_mb << 20,
            "probe": {"period": 0},
        }
    )
    with RayVirtualCluster(
        [2], use_gpus=False, max_colocated_worker_groups=2
    ) as cluster:
        policy = TrainingPolicy(cluster, config)
        generator = GenerationPolicy(
            cluster,
            GenerationConfig(max_new_tokens=4, num_replicas=1),
            model_name=model,
            load_weights=False,
        )
        sync = WeightSynchronizer(policy, generator, settings)
        try:
            yield policy, sync
        finally:
            sync.close()
            generator.shutdown()
            policy.shutdown()


def in_turns(
    policy: TrainingPolicy, sync: WeightSynchronizer, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Sync in both ways alternately; return seconds, and bytes that ranks received."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    bytes_of: dict[str, list[int]] = {}
    for _ in range(rounds):
        for way in WAYS:
            switch(policy, way)
            # Each way has its own links, which the first sync joins.
            sync.sync_weights()
            for _ in range(SYNCS_PER_TURN):
                before = on_ranks(policy, received_bytes)
                began_s = time.perf_counter()
                sync.sync_weights()
                times[way].append(time.perf_counter() - began_s)
                after = on_ranks(policy, received_bytes)
                bytes_of[way] = [a - b for a, b in zip(after, before, strict=True)]
    return times, bytes_of


def switch(policy: TrainingPolicy, way: str) -> None:
    """Have the ranks export in one of the ways from now on."""
    on_ranks(policy, gather_on_all if way == "all" else collect_on_senders)
    policy._exports._turns.clear()


def gather_on_all(host: Any) -> int:
    """Hide from a rank that its backend exports shards."""
    worker = host._worker
    worker._hidden = worker._collector or worker._hidden
    worker._collector = None
    return 0


def collect_on_senders(host: Any) -> int:
    """Undo `gather_on_all`."""
    worker = host._worker
    worker._collector = worker._collector or worker._hidden
    return 0


def received_bytes(host: Any) -> int:
    """Bytes that this process has received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # It may be closed meanwhile.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    found = copy.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
                    total += struct.unpack_from("Q", found, BYTES_RECEIVED_AT)[0]
    return total


def sizes(model: Path) -> tuple[int, int]:
    """Return the bytes of the largest tensor and of all."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    each = [parameter.nbytes for parameter in made.parameters()]
    return max(each), sum(each)


def on_ranks(policy: TrainingPolicy, work: Any) -> list[int]:
    """Run a function in the process of every rank."""
    calls = [worker.__ray_call__.remote(work) for worker in policy.group.workers]
    found: list[int] = ray.get(calls, timeout=DEADLINE_S)
    return found


def begin(host: Any) -> int:
    """Reset the peak; return the resident memory in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(host: Any) -> int:
    """Return the largest resident memory since `begin`, in KiB."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    main()
