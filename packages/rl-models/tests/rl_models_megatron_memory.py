"""Measure training steps of one rank of the backend `megatron`, in its environment.

`python rl_models_megatron_memory.py FOLDER` takes configurations of policies by name
from `FOLDER/cases.json`, and writes the bytes that each needs to `FOLDER/found.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rl_models_live_bytes import LiveBytes
from rl_models_sample_megatron import Loss

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.training.megatron import MegatronTrainingBackend


def measured(config: dict[str, Any]) -> dict[str, int]:
    """Return bytes of weights and state, and the peak of steps beyond these."""
    policy = PolicyConfig.from_dict(config)
    rows, width = policy.train_micro_batch_size, policy.max_total_sequence_length or 0
    backend = MegatronTrainingBackend()
    backend.setup(policy.to_dict())
    masters = backend.model.masters
    computed = list(masters._computed.values())
    copies = [p for p in masters.parameters.values() if p.dtype != computed[0].dtype]

    def batch(num_rows: int) -> BatchedDataDict[Any]:
        size = backend.model.config.vocab_size
        return BatchedDataDict(
            {
                "input_ids": torch.randint(0, size, (num_rows, width)),
                "input_lengths": torch.full((num_rows,), width),
                "token_mask": torch.ones(num_rows, width),
                "sample_mask": torch.ones(num_rows),
            }
        )

    def step(num_rows: int) -> None:
        backend.train_step(
            batch(num_rows), Loss("sft"),
            global_batch_size=num_rows, micro_batch_size=rows,
        )  # fmt: skip

    step(rows)
    states = [t for s in backend._steps.optimizer.state.values() for t in s.values()]
    kept = [*computed, *masters.parameters.values(), *states]
    found = {
        "weights": sum(p.nbytes for p in (*computed, *copies)),
        "optimizer": sum(s.nbytes for s in states if s.ndim),
    }
    for name, num_rows in (("several", 3 * rows), ("one", rows)):
        with LiveBytes(kept) as live:
            step(num_rows)
        found[name] = live.peak
    with LiveBytes(kept) as live:
        backend.get_logprobs(batch(2 * rows), micro_batch_size=rows)
    backend.shutdown()
    return {**found, "logprobs": live.peak}


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    found = {name: measured(config) for name, config in cases.items()}
    (folder / "found.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
