"""`python -m benchmarks.overhead`: the cost of a GRPO step beyond its actual work.

One step samples 512 answers (64 prompts x 8) of such a length that every row has 512
tokens, computes the log-probs of the old policy, and trains in two optimizer steps. Its
wall time, from the start of one step to the start of the next, is divided into

- work: sampling (`generation/sampling`), log-probs and training in the workers,
- weights: handing the new weights to the generator,
- overhead: everything else: drawing and tokenizing prompts, decoding, rewards,
  filters, advantages, rows, sharding, logging, and the bookkeeping of checkpoints.

One JSON line is printed; `share` is overhead / wall and must stay below 0.03. With
`--record` the rows are recorded (`recorded_bytes` of each step). With `--profile N`,
the N controller functions with the most own time follow.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rl_algorithms as rl
from benchmarks.workload import Workload, reward

PROMPT_TOKENS, ROW_TOKENS = 64, 512
NUM_PROMPTS, NUM_GENERATIONS = 64, 8
WARMUP_STEPS = 1
TARGET = 0.03
WORK = {
    "sampling": "timing:generation/sampling",
    "logprobs": "timing:policy_and_reference_logprobs",
    "training": "timing:policy_training/train",
}
WEIGHTS = "timing:prepare_for_generation/total"


class Clock(rl.Callback):
    """Splits the time from step to step."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.steps: list[dict[str, float]] = []
        self._profile = profile
        self._began_s = 0.0
        self._parts: dict[str, float] = {}

    def on_step_begin(self, *args: Any) -> None:
        """End the previous step."""
        now_s = time.perf_counter()
        if self._parts:
            wall_s = now_s - self._began_s
            rest_s = wall_s - sum(self._parts.values())
            self.steps.append({**self._parts, "overhead": rest_s, "wall": wall_s})
        if self._profile is not None and len(self.steps) == WARMUP_STEPS:
            self._profile.enable()
        self._began_s = now_s

    def on_step_end(
        self, trainer: Any, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Read this step's timers."""
        self._parts = {part: metrics[name] for part, name in WORK.items()}
        self._parts["weights"] = metrics.get(WEIGHTS, 0.0)


def run(options: argparse.Namespace, folder: Path, clock: Clock) -> None:
    """Run one step more than is measured."""
    new_tokens = ROW_TOKENS - PROMPT_TOKENS
    work = Workload(
        "overhead", options.hidden, options.layers, 4, NUM_PROMPTS, NUM_GENERATIONS,
        (PROMPT_TOKENS, PROMPT_TOKENS), new_tokens, True, 0.0,
    )  # fmt: skip
    steps = options.steps + WARMUP_STEPS + 1
    rows = work.prompts(NUM_PROMPTS * steps)
    model = work.model(folder, context=ROW_TOKENS)
    num_rows = NUM_PROMPTS * NUM_GENERATIONS
    rl.train(
        model,
        [{"prompt": row["prompt"]} for row in rows],
        lambda prompt, response: reward(response),
        policy={
            "max_total_sequence_length": ROW_TOKENS,
            "train_global_batch_size": num_rows // 2,
            "train_micro_batch_size": 16,
            "logprob_batch_size": 16,
            "optimizer": {"kwargs": {"lr": 1e-6}},
            "generation": {"max_new_tokens": new_tokens, "stop_token_ids": []},
        },
        num_prompts_per_step=NUM_PROMPTS,
        num_generations_per_prompt=NUM_GENERATIONS,
        max_num_steps=steps,
        cluster={"workers_per_node": options.workers, "use_gpus": False},
        checkpointing={"save_period": 10_000},
        loss_fn={"reference_policy_kl_penalty": 0.0},
        val_period=0,
        output_dir=str(folder / "run"),
        record_training=options.record,
        callbacks=[clock],
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="record_training=true")
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    options = parser.parse_args()
    profile = cProfile.Profile() if options.profile else None
    clock = Clock(profile)
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder), clock)
        recorded = [p.stat().st_size for p in Path(folder).glob("run/recording/*")]
    measured = clock.steps[WARMUP_STEPS:]
    parts = {
        name: round(statistics.median(step[name] for step in measured), 4)
        for name in measured[0]
    }
    share = statistics.median(step["overhead"] / step["wall"] for step in measured)
    line = {
        "bench": "overhead",
        "samples": NUM_PROMPTS * NUM_GENERATIONS,
        "tokens": ROW_TOKENS,
        "median_s": parts,
        "steps": len(measured),
        "share": round(share, 4),
        "recorded_bytes": sum(recorded) // (options.steps + WARMUP_STEPS + 1),
        "target": TARGET,
        "verdict": "reached" if share < TARGET else "missed",
    }
    sys.stdout.write(json.dumps(line) + "\n")
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)


if __name__ == "__main__":
    main()
