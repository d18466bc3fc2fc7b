"""`python -m benchmarks.training_step`: a training step of one rank and a bare loop.

Both sides hold the same model in one process with one thread, train by AdamW on the
same tokens, and take turns step by step; the medians are compared.

- `fixed`: rows of one length. The peer is a hand-written loop: transformers'
  model, `cross_entropy` of all tokens, `backward` for each micro-batch, clipping, a
  fused optimizer step. `ratio` is our time over the peer's; the target is 1.1.
- `ragged`: rows with the long tail of real text, packed by ours; by hand in the same
  micro-batches, each padded to its longest row. `ratio` is the peer's time over ours;
  the target is 1.5. Ours is as fast without `sequence_packing`, as the backend keeps
  padding out of the model either way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config

from rl_algorithms.losses.nll import NLLLossFn
from rl_distributed import BatchedDataDict
from rl_models import PolicyConfig
from rl_models.training.dtensor import DTensorTrainingBackend

ROWS, MICRO_BATCH, WIDTH, VOCABULARY = 32, 8, 256, 2048
RATE, WARMUP = 1e-4, 3
SHAPE = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=1024,
    max_position_embeddings=2 * WIDTH,
)


def main() -> None:
    """Run the named measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["fixed", "ragged"])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        AutoModelForCausalLM.from_config(SHAPE).save_pretrained(model)
        measured = {"fixed": fixed, "ragged": ragged}
        for name in options.names:
            sides, target, higher = measured[name](model)
            times = _by_turns(sides, options.rounds)
            first, second = times.values()
            ratio = first / second
            line = {
                "name": name,
                **{f"{side}_s": round(time_s, 4) for side, time_s in times.items()},
                "ratio": round(ratio, 3),
                "target": target,
                "met": ratio >= target if higher else ratio <= target,
            }
            sys.stdout.write(json.dumps(line) + "\n")


Sides = dict[str, Callable[[], Any]]


def fixed(model: str) -> tuple[Sides, float, bool]:
    """Compare our backend with a hand-written loop on rows of one length."""
    rows = _rows(torch.full((ROWS,), WIDTH))
    trainer = _trainer(model)

    def ours() -> float:
        return _step(trainer, rows)

    hand_written = _bare_loop(model, rows)
    found, expected = ours(), hand_written()
    assert abs(found - expected) < 1e-4 * expected, (found, expected)
    return {"ours": ours, "hand_written": hand_written}, 1.1, False


def ragged(model: str) -> tuple[Sides, float, bool]:
    """Compare rows of log-normal length, padded and packed."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randn(ROWS * 2, generator=generator).mul(0.8).add(4.0).exp()
    rows = _rows(lengths.long().clamp(4, WIDTH))
    packing = {
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
        "max_tokens_per_microbatch": MICRO_BATCH * WIDTH,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    shards, _ = rows.shard_by_batch_size(1, rows.size, sequence_packing_args=packing)
    trainer = _trainer(model)
    sides: Sides = {
        "padded": _bare_loop(model, rows),
        "packed": lambda: _step(trainer, shards[0]),
    }
    return sides, 1.5, True


def _bare_loop(model: str, rows: BatchedDataDict[Any]) -> Callable[[], float]:
    """Run a hand-written step; return the loss."""
    by_hand = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_hand.train()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=RATE, fused=True)
    lengths, masks = rows["input_lengths"], rows["token_mask"]
    num_targets = int(masks[:, 1:].sum())

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, rows.size, MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            width = int(lengths[part].max())
            tokens, mask = rows["input_ids"][part, :width], masks[part, :width]
            # The last column predicts nothing; rows of one length need no mask.
            seen = None if bool(mask.all()) else mask[:, :-1]
            inputs = {"input_ids": tokens[:, :-1], "attention_mask": seen}
            logits = by_hand(**inputs, use_cache=False).logits
            targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )
            loss = loss / num_targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def _rows(lengths: torch.Tensor) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    within = torch.arange(WIDTH) < lengths[:, None]
    ids = torch.randint(4, VOCABULARY, within.shape, generator=generator) * within
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=within.long(),
        sample_mask=torch.ones(len(lengths)),
    )


def _trainer(model: str) -> DTensorTrainingBackend:
    config = PolicyConfig.from_dict(
        {
            "model_name": model,
            "max_total_sequence_length": WIDTH,
            "max_grad_norm": 1.0,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE}},
        }
    )
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    return backend


def _step(backend: DTensorTrainingBackend, rows: BatchedDataDict[Any]) -> float:
    result = backend.train_step(
        rows,
        NLLLossFn(),
        global_batch_size=rows.size,
        micro_batch_size=MICRO_BATCH,
    )
    return float(result["loss"].item())


def _by_turns(sides: Sides, rounds: int) -> dict[str, float]:
    """Return the median seconds of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(WARMUP + rounds):
        for name, step in sides.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken[WARMUP:]) for name, taken in times.items()}


if __name__ == "__main__":
    main()
