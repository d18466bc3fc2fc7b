"""`python -m benchmarks.ragged_generation`: answers of very different lengths.

The backend `huggingface` decodes 8 rows for each slot of a batch. With
`max_batch_size`, a waiting row takes the slot of one that has ended; the peer is the
same backend run batch by batch, each as long as its longest row, out of which finished
rows are dropped as well. Both sample the same tokens. One JSON line per model and size
of the batch; times are CPU times of this process, with one thread.

`ratio_of_passes` counts passes through the model: the ratio of times in the limit where
a pass costs the same with one row as with a full batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models import GenerationConfig, ModelBuildConfig, build_model
from rl_models.generation.huggingface import HuggingFaceGenerationBackend

PROMPT_TOKENS, NEW_TOKENS = 16, 256
ROWS_PER_PLACE = 8
TARGET = 1.5
# Hidden size, layers, sizes of the batch, and the share of the calls that are measured.
MODELS = ((128, 4, (8, 32), 1.0), (512, 8, (8,), 0.4))


def main() -> None:
    """Measure all models and sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5, help="measured calls per side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for hidden_size, num_layers, sizes, share in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model = _model(Path(folder), hidden_size, num_layers)
            for size in sizes:
                calls = max(1, round(share * options.calls))
                line = measure(model, size, calls)
                line = {
                    "bench": "ragged_generation",
                    "hidden_size": hidden_size,
                    "layers": num_layers,
                    **line,
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


def _model(folder: Path, hidden_size: int, num_layers: int) -> Path:
    config = ModelBuildConfig.from_dict(
        {
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "max_position_embeddings": PROMPT_TOKENS + NEW_TOKENS,
            "tokenizer": {"characters": string.ascii_letters + string.digits},
        }
    )
    return Path(str(build_model(config, folder, seed=0)))


def measure(model: Path, size: int, calls: int) -> dict[str, Any]:
    """Compare the two ways at one batch size, alternating call by call."""
    backend = HuggingFaceGenerationBackend()
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, max_batch_size=size, stop_token_ids=[3]
    )
    backend.setup(config.to_dict(), model_name=str(model))
    times: dict[str, list[float]] = {"joining": [], "one after the other": []}
    lengths: list[int] = []
    num_passes: list[int] = []
    # The first call warms up, and counts passes: to be told of every one takes time.
    for call in range(calls + 1):
        rows = _rows(size * ROWS_PER_PLACE, call)
        batches = [
            rows.slice(first, first + size) for first in range(0, rows.size, size)
        ]
        if not call:
            num_passes = [_passes(backend, part) for part in ([rows], batches)]
        joined, joining_s = _timed(backend, [rows])
        cut, cut_s = _timed(backend, batches)
        lengths = joined[0]["generation_lengths"].tolist()
        assert lengths == [n for part in cut for n in part["generation_lengths"]]
        if call:
            times["joining"].append(joining_s)
            times["one after the other"].append(cut_s)
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    ratio = medians["one after the other"] / medians["joining"]
    return {
        "max_batch_size": size,
        "rows": size * ROWS_PER_PLACE,
        "mean_tokens": round(statistics.mean(lengths), 1),
        "longest": max(lengths),
        "median_cpu_s": {way: round(value, 4) for way, value in medians.items()},
        "ratio": round(ratio, 2),
        "ratio_of_passes": round(num_passes[1] / num_passes[0], 2),
        "target": TARGET,
        "verdict": "reached" if ratio >= TARGET else "missed",
    }


def _rows(count: int, call: int) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(call)
    ids = torch.randint(4, 60, (count, PROMPT_TOKENS), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((count,), PROMPT_TOKENS),
            "seeds": torch.arange(count) + call * count,
        }
    )


def _passes(
    backend: HuggingFaceGenerationBackend, calls: Sequence[BatchedDataDict[Any]]
) -> int:
    passes: list[int] = []
    for rows in calls:
        backend.generate(rows, on_step=lambda rows, *_: passes.append(len(rows)))
    return len(passes)


def _timed(
    backend: HuggingFaceGenerationBackend, calls: Sequence[BatchedDataDict[Any]]
) -> tuple[list[Any], float]:
    # CPU time: other load on the machine matters less.
    began = time.process_time()
    result = [backend.generate(rows) for rows in calls]
    return result, time.process_time() - began


if __name__ == "__main__":
    main()
