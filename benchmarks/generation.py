"""`python -m benchmarks.generation [--quick]`: tokens per second of the two backends.

One JSON line per model and batch. Each backend runs as one replica with one thread in a
process of its own; they take turns call by call, and the medians are compared. The rule
of `backend: auto` (`rl_models.generation.choice`) is based on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.start import init_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models import GenerationConfig, GenerationPolicy, ModelBuildConfig, build_model

BACKENDS = ("huggingface", "vllm")
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Size:
    """A model and its workload."""

    hidden_size: int
    num_layers: int
    num_heads: int
    new_tokens: int
    batches: tuple[int, ...]
    precision: str = "float32"


SIZES = (
    Size(64, 2, 4, 32, (1, 16, 64, 256, 512)),
    Size(128, 4, 4, 32, (1, 16, 64, 256)),
    Size(256, 6, 4, 32, (1, 16, 64, 256)),
    Size(512, 8, 8, 16, (1, 16, 64)),
    Size(512, 8, 8, 16, (1, 16, 64), "bfloat16"),
    Size(768, 12, 12, 16, (1, 16), "bfloat16"),
)


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5, help="measured calls per side")
    parser.add_argument("--quick", action="store_true", help="the first three sizes")
    options = parser.parse_args()
    init_ray(num_cpus=2)
    sizes = SIZES[:3] if options.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        for index, size in enumerate(sizes):
            for line in measure(size, options.calls, Path(folder) / str(index)):
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


def measure(size: Size, calls: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one line per batch; both backends are up at the same time."""
    model = build_model(
        ModelBuildConfig.from_dict(
            {
                "hidden_size": size.hidden_size,
                "num_hidden_layers": size.num_layers,
                "num_attention_heads": size.num_heads,
                "intermediate_size": 4 * size.hidden_size,
                "max_position_embeddings": 128,
                "tokenizer": {"characters": "0123456789="},
            }
        ),
        folder,
        seed=0,
    )
    with RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as both:
        sides = {name: _policy(both, name, size, model) for name in BACKENDS}
        try:
            for batch in size.batches:
                yield _compare(sides, size, batch, calls)
        finally:
            for side in sides.values():
                side.shutdown()


def _policy(
    cluster: RayVirtualCluster, backend: str, size: Size, model: Any
) -> GenerationPolicy:
    config = GenerationConfig.from_dict(
        {
            "backend": backend,
            "max_new_tokens": size.new_tokens,
            "precision": size.precision,
            "stop_token_ids": [],
            "vllm": {"max_num_seqs": max(size.batches)},
        }
    )
    return GenerationPolicy(
        cluster, config, model_name=model, name_prefix=f"generation-{backend}"
    )


def _compare(
    sides: dict[str, GenerationPolicy], size: Size, batch: int, calls: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for call in range(calls + 1):
        # New prompts each time: the last call's cache must not help.
        ids = torch.randint(3, 13, (batch, PROMPT_TOKENS), generator=generator)
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {
                "input_ids": ids,
                "input_lengths": torch.full((batch,), PROMPT_TOKENS),
                "seeds": torch.arange(batch) + call * batch,
            }
        )
        for name, side in sides.items():
            began = time.perf_counter()
            side.generate(rows)
            if call:
                times[name].append(time.perf_counter() - began)
    speed = {
        name: batch * size.new_tokens / statistics.median(taken)
        for name, taken in times.items()
    }
    return {
        "bench": "generation",
        "hidden_size": size.hidden_size,
        "layers": size.num_layers,
        "precision": size.precision,
        "rows": batch,
        "new_tokens": size.new_tokens,
        **{f"{name}_tokens_per_s": round(value) for name, value in speed.items()},
        "vllm_over_huggingface": round(speed["vllm"] / speed["huggingface"], 3),
    }


if __name__ == "__main__":
    main()
