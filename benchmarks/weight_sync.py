"""`python -m benchmarks.weight_sync`: time of weights from trainer to generator.

One JSON line per model, backend and transport: the median time of a verified sync. With
the backend vllm also the two unavoidable parts of a sync, measured alternately with it:
vLLM's own in-place load of the same tensors, from memory of its own process, and one
round trip of the same bytes through Ray's object store. `ratio` is the sync over the
sum of both. First-touch page faults slow the first turns of all three; they do not
count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_distributed import RayWorkerBuilder, RayWorkerGroup
from rl_distributed.cluster.start import init_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models import (
    GenerationConfig,
    GenerationPolicy,
    HuggingFacePolicy,
    ModelBuildConfig,
    WeightSyncConfig,
    WeightSynchronizer,
    build_model,
)
from rl_models.environments import VLLM
from rl_models.generation.vllm.engine_args import engine_variables

TRANSPORTS = ("auto", "object_store", "shared_memory", "collective", "file")
WARMUP_ROUNDS = 3
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Size:
    """A model, and the limit for its sync."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    precision: str
    target_s: float | None = None
    target_ratio: float | None = None


SIZES = (
    Size("0.8M", 128, 4, 4, 384, "float32", target_s=0.05),
    Size("93M", 768, 10, 12, 3024, "bfloat16", target_ratio=1.5),
)


class Engine:
    """A vLLM engine beside the replicas' own, to load without a transfer."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        # In this environment, which has vllm.
        from rl_models.generation.vllm import VllmGenerationBackend

        self.backend = VllmGenerationBackend()
        self.backend.setup(settings, model_name=folder)
        self.weights: list[tuple[str, torch.Tensor]] = []

    def keep(self, folder: str, precision: str) -> int:
        """Read the weights into this process's memory; return their bytes."""
        from rl_models.ops.causal_lm import load_causal_lm

        model = load_causal_lm(folder, precision)
        self.weights = [(n, p.detach().clone()) for n, p in model.named_parameters()]
        return sum(tensor.nbytes for _, tensor in self.weights)

    def load(self) -> float:
        """Return the seconds of one in-place load."""
        began_s = time.perf_counter()
        self.backend.load_weights(iter(self.weights), 1)
        return time.perf_counter() - began_s

    def take(self, block: Any) -> int:
        """Touch each page received through the object store."""
        return int(block[::4096].sum())


def main() -> None:
    """Measure all sizes and backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="*", default=[size.name for size in SIZES])
    parser.add_argument("--backends", nargs="*", default=["vllm", "huggingface"])
    parser.add_argument("--transports", nargs="*", default=[*TRANSPORTS])
    parser.add_argument("--bucket-mb", type=int, default=0, help="0: the default")
    options = parser.parse_args()
    init_ray(num_cpus=2)
    for size in SIZES:
        if size.name not in options.sizes:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(size, Path(folder) / "model")
            for backend in options.backends:
                for line in measure(size, backend, model, options):
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()


def make_model(size: Size, folder: Path) -> Path:
    """Write the model."""
    config = {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "intermediate_size": size.intermediate_size,
        "max_position_embeddings": 128,
        "tokenizer": {"characters": "0123456789="},
    }
    return build_model(ModelBuildConfig.from_dict(config), folder, seed=0)


def measure(
    size: Size, backend: str, model: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield one line per transport; all take turns."""
    with ExitStack() as parts:
        cluster = parts.enter_context(
            RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=3)
        )
        policy = HuggingFacePolicy(
            model,
            cluster,
            precision=size.precision,
            max_total_sequence_length=128,
        )
        parts.callback(policy.shutdown)
        config = GenerationConfig.from_dict(
            {
                "backend": backend,
                "max_new_tokens": 16,
                "precision": size.precision,
                "vllm": {"max_num_seqs": 16},
            }
        )
        generation = GenerationPolicy(
            cluster, config, model_name=model, load_weights=False
        )
        parts.callback(generation.shutdown)
        needed = (
            baselines(size, config, cluster, model, parts) if backend == "vllm" else {}
        )
        for transport in options.transports:
            run = sync_with(transport, policy, generation, options, parts)
            medians = in_turns({"sync": run, **needed}, options.rounds)
            yield line_of(size, backend, transport, medians, options.rounds)


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, after the warm-up turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + WARMUP_ROUNDS):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(t[WARMUP_ROUNDS:]) for name, t in times.items()}


def sync_with(
    transport: str,
    policy: HuggingFacePolicy,
    generation: GenerationPolicy,
    options: argparse.Namespace,
    parts: ExitStack,
) -> Callable[[], float]:
    """Return a function that runs one sync and returns its seconds."""
    settings: dict[str, Any] = {"transport": transport}
    if options.bucket_mb:
        settings["bucket_bytes"] = options.bucket_mb << 20
    sync = WeightSynchronizer(policy, generation, WeightSyncConfig.from_dict(settings))
    parts.callback(sync.close)

    def run() -> float:
        began_s = time.perf_counter()
        sync.sync_weights()
        return time.perf_counter() - began_s

    return run


def baselines(
    size: Size,
    config: GenerationConfig,
    cluster: RayVirtualCluster,
    model: Path,
    parts: ExitStack,
) -> dict[str, Callable[[], float]]:
    """Return the unavoidable parts of a sync, separately."""
    builder = RayWorkerBuilder(Engine, config.to_dict(), str(model))
    group = parts.enter_context(
        RayWorkerGroup(
            cluster,
            builder.with_options(environment=VLLM),
            name_prefix="engine",
            env_vars=engine_variables(config, on_gpu=False),
            start_deadline_s=DEADLINE_S,
        )
    )

    def call(method: str, **arguments: Any) -> Any:
        reference = group.run_single_worker_single_data(method, 0, **arguments)
        (result,) = group.get_all_worker_results([reference], deadline_s=DEADLINE_S)
        return result

    num_bytes = call("keep", folder=str(model), precision=size.precision)
    block = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy()

    def round_trip() -> float:
        began_s = time.perf_counter()
        call("take", block=block)
        return time.perf_counter() - began_s

    return {"load": lambda: float(call("load")), "round_trip": round_trip}


def line_of(
    size: Size, backend: str, transport: str, medians: dict[str, float], rounds: int
) -> dict[str, Any]:
    """Return the result as it is printed."""
    sync_s = medians["sync"]
    line: dict[str, Any] = {
        "bench": "weight_sync",
        "model": size.name,
        "precision": size.precision,
        "backend": backend,
        "transport": transport,
        "sync_ms": round(1e3 * sync_s, 2),
        "rounds": rounds,
    }
    reached = []
    if size.target_s is not None:
        line["target_ms"] = 1e3 * size.target_s
        reached.append(sync_s <= size.target_s)
    if "load" in medians:
        line["load_ms"] = round(1e3 * medians["load"], 2)
        line["round_trip_ms"] = round(1e3 * medians["round_trip"], 2)
        ratio = sync_s / (medians["load"] + medians["round_trip"])
        line["ratio"] = round(ratio, 2)
        if size.target_ratio is not None:
            line["target_ratio"] = size.target_ratio
            reached.append(ratio <= size.target_ratio)
    if reached:
        line["verdict"] = "reached" if all(reached) else "missed"
    return line


if __name__ == "__main__":
    main()
