"""`python -m benchmarks.weight_sync_memory`: memory of each rank during a weight sync.

Two training ranks share a model in each layout in turn, and send it to one replica. One
JSON line per layout: `growth_mb` is what the resident memory of each rank grew by at
most during the first sync, which touches all memory that later ones reuse, and `ratio`
the largest of them over the size of the model. A rank that gathered the whole model
would have a ratio of 1. Weights and generator are in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
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


def main() -> None:
    """Measure all layouts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--bucket-mb", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1, help="factor of the layers")
    options = parser.parse_args()
    init_ray(num_cpus=4)
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder), options.depth)
        for layout in options.layouts:
            model = models["expert" if "expert" in layout else "dense"]
            line = measure(layout, model, options.bucket_mb << 20)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def make_models(folder: Path, depth: int) -> dict[str, Path]:
    """Write a dense model and a mixture, both of many layers."""
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


def measure(layout: str, model: Path, bucket_bytes: int) -> dict[str, Any]:
    """Sync one layout, and return the memory that its ranks needed."""
    config = PolicyConfig.from_dict({"model_name": str(model), **LAYOUTS[layout]})
    settings = WeightSyncConfig.from_dict(
        {
            "transport": "shared_memory",
            "bucket_bytes": bucket_bytes,
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
        before = on_ranks(policy, begin)
        sync.sync_weights()
        peaks = on_ranks(policy, peak)
        sync.close()
        generator.shutdown()
        policy.shutdown()
    growth = [after - start for after, start in zip(peaks, before, strict=True)]
    largest, total = sizes(model)
    return {
        "bench": "weight_sync_memory",
        "layout": layout,
        "model_mb": round(total / 2**20, 1),
        "largest_tensor_mb": round(largest / 2**20, 1),
        "bucket_mb": round(bucket_bytes / 2**20, 1),
        "growth_mb": [round(each / 1024, 1) for each in growth],
        "ratio": round(max(growth) * 1024 / total, 3),
    }


def sizes(model: Path) -> tuple[int, int]:
    """Bytes of the largest tensor and of all."""
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
    """Largest resident memory since `begin`, in KiB."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    main()
