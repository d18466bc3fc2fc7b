"""`python -m benchmarks.training_step_gpu`: a training step on a GPU, and plain FSDP2.

One process and one GPU, a Qwen2-shaped model with random weights, computed in bfloat16
with weights and optimizer state in float32, and a fused AdamW. The peer is a
hand-written loop: transformers' model, `fully_shard` of each layer with the same mixed
precision, `cross_entropy` of all tokens, clipping. The sides run one after the other,
as both need the memory.

- `fixed`: rows of one length.
- `ragged`: rows with the long tail of real text, packed by ours; by hand in
  micro-batches of as many rows, each padded to its longest.

A line has the tokens per second of both sides, the share of the GPU's peak that the
model's own operations reach (`mfu`), the peak memory, and `ratio`: our tokens per
second over the peer's; the target is 1.0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen2Config

from rl_algorithms.losses.nll import NLLLossFn
from rl_distributed import BatchedDataDict
from rl_models import PolicyConfig
from rl_models.planning.flops import ModelFlops, gpu_peak_tflops
from rl_models.training.dtensor import DTensorTrainingBackend

WIDTH, ROWS, MICRO_BATCH = 2048, 16, 4
RATE, WARMUP = 1e-5, 3
SHAPES = {
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
}
VOCABULARY = 151_936
Rows = BatchedDataDict[Any]


def main() -> None:
    """Run the named measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["fixed", "ragged"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--compile", help="compile the layers of both sides")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU: torch sees none")
    os.environ.update(
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571"
    )
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=2 * WIDTH,
        **SHAPES[options.shape],
    )
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        AutoModelForCausalLM.from_config(shape).save_pretrained(model)
        for name in options.names:
            line = _measured(name, model, shape, options)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


def _measured(name: str, model: str, shape: Qwen2Config, options: Any) -> Any:
    lengths = torch.full((ROWS,), WIDTH) if name == "fixed" else _ragged_lengths()
    rows = _rows(lengths)
    flops = ModelFlops.of(shape)
    assert flops is not None
    peak = gpu_peak_tflops(torch.cuda.get_device_name(0))
    line: dict[str, Any] = {"name": name, "shape": options.shape}
    line["gpu"] = torch.cuda.get_device_name(0)
    speeds, losses = {}, {}
    for side, build in {"ours": _ours, "fsdp2": _plain_fsdp2}.items():
        step = build(model, rows, options.compile)
        torch.cuda.reset_peak_memory_stats()
        times, losses[side] = _timed(step, options.rounds)
        seconds = statistics.median(times)
        speeds[side] = int(lengths.sum()) / seconds
        line[f"{side}_tokens_per_s"] = round(speeds[side])
        line[f"{side}_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if peak is not None:
            share = flops.training(lengths) / seconds / (peak * 1e12)
            line[f"{side}_mfu"] = round(share, 3)
        del step
        gc.collect()
        torch.cuda.empty_cache()
    # Both compute in bfloat16, in a different order.
    assert abs(losses["ours"] - losses["fsdp2"]) < 0.01 * losses["fsdp2"], losses
    ratio = speeds["ours"] / speeds["fsdp2"]
    return {**line, "ratio": round(ratio, 3), "target": 1.0, "met": ratio >= 1.0}


def _timed(step: Callable[[], float], rounds: int) -> tuple[list[float], float]:
    """Return the seconds of each step after the first ones, and the first loss."""
    first = step()
    for _ in range(WARMUP - 1):
        step()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return times, first


def _ours(model: str, rows: Rows, compiler: str | None) -> Callable[[], float]:
    config = PolicyConfig.from_dict(
        {
            "model_name": model,
            "precision": "bfloat16",
            "max_total_sequence_length": WIDTH,
            "max_grad_norm": 1.0,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": RATE, "fused": True},
            },
            "dtensor": {"compile": compiler},
        }
    )
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    if not bool((rows["input_lengths"] == WIDTH).all()):
        packing = {
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 1,
            "max_tokens_per_microbatch": MICRO_BATCH * WIDTH,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
        }
        (rows,), _ = rows.shard_by_batch_size(
            1, rows.size, sequence_packing_args=packing
        )

    def step() -> float:
        result = backend.train_step(
            rows,
            NLLLossFn(),
            global_batch_size=rows.size,
            micro_batch_size=MICRO_BATCH,
        )
        return float(result["loss"].item())

    return step


def _plain_fsdp2(model: str, rows: Rows, compiler: str | None) -> Callable[[], float]:
    if not dist.is_initialized():
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
    with torch.device("cuda"):
        by_hand = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_hand.train()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for layer in by_hand.model.layers:
        if compiler is not None:
            layer.compile(backend=compiler)
        fully_shard(layer, mp_policy=policy)
    fully_shard(by_hand, mp_policy=policy)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=RATE, fused=True)
    lengths = rows["input_lengths"]
    num_targets = int(rows["token_mask"][:, 1:].sum())

    def step() -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device="cuda")
        for start in range(0, rows.size, MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            width = int(lengths[part].max())
            tokens = rows["input_ids"][part, :width].cuda()
            mask = rows["token_mask"][part, :width].cuda()
            # The last column predicts nothing; rows of one length need no mask.
            is_full = bool((lengths[part] == width).all())
            seen = None if is_full else mask[:, :-1]
            logits = by_hand(tokens[:, :-1], attention_mask=seen, use_cache=False)
            targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = cross_entropy(
                logits.logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
            )
            loss = loss / num_targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
        return float(total)

    return step


def _ragged_lengths() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randn(ROWS * 2, generator=generator).mul(0.8).add(6.0).exp()
    return lengths.long().clamp(16, WIDTH)


def _rows(lengths: torch.Tensor) -> Rows:
    generator = torch.Generator().manual_seed(0)
    within = torch.arange(WIDTH) < lengths[:, None]
    ids = torch.randint(4, VOCABULARY, within.shape, generator=generator) * within
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=within.long(),
        sample_mask=torch.ones(len(lengths)),
    )


if __name__ == "__main__":
    main()
