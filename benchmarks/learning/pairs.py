"""Methods that learn from pairs of answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.learning.experiment import Curve, curve_of, train, with_model
from benchmarks.learning.sorting import NUM_STEPS, Sorting
from rl_algorithms import KeptWorkers
from rl_algorithms.data.config import DatasetConfig, TasksConfig
from rl_algorithms.data.sources import load_configured
from rl_algorithms.evaluation import evaluate

__all__ = ["dpo", "reward_model"]


def preferences(folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """Return pairs: the correct answer, and a wrong one from the model."""
    files = {}
    for part, num_rows in (("train", 2048), ("held_out", 512)):
        tasks = {"world": "sorting", "part": part, "num_rows": num_rows}
        found = evaluate(
            model,
            config={
                "datasets": {part: {"tasks": {**tasks, "settings": {"num_digits": 6}}}},
                "env": {"name": "sorting"},
                "generation": {"max_new_tokens": 8},
                "num_generations": 4,
                "seed": seed,
            },
        )
        pairs: dict[int, dict[str, str]] = {}
        for sample in found.samples:
            right = "".join(sorted(sample["prompt"].removesuffix("=")))
            if sample["response"].strip() not in ("", right):
                answers = {"chosen": right, "rejected": sample["response"]}
                pairs.setdefault(sample["idx"], {"prompt": sample["prompt"], **answers})
        files[part] = folder / f"{part}.jsonl"
        lines = "\n".join(json.dumps(pair) for pair in pairs.values())
        files[part].write_text(lines)
    return {"train": str(files["train"]), "validation": str(files["held_out"])}


def dpo(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
    """Prefer correct answers to wrong ones, starting from the imitation model."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = {
        "policy": {
            **Sorting.stage("grpo")["policy"],
            "train_global_batch_size": 128,
            "train_micro_batch_size": 256,
            "optimizer": {"kwargs": {"lr": 5e-4, "betas": [0.9, 0.99]}},
            "scheduler": {"warmup_steps": 10},
            "generation": None,
        },
        "data": preferences(folder, start, seed),
        "dpo": {
            "max_num_steps": NUM_STEPS,
            "val_period": NUM_STEPS // 10,
            "val_at_start": True,
            "val_at_end": True,
            "val_global_batch_size": 512,
            "val_batches": None,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.1},
        "checkpointing": {"enabled": False},
    }
    result = train("dpo", with_model(settings, start), folder / "run", seed, pool)
    return curve_of(result, "val:policy_accuracy")


def orders(folder: Path, seed: int) -> dict[str, Any]:
    """Return pairs: the digits in order, and in any other order."""
    rng = random.Random(seed)
    files = {}
    for part, num_rows in (("train", 4096), ("held_out", 512)):
        tasks = TasksConfig(
            world="sorting", part=part, num_rows=num_rows, settings={"num_digits": 6}
        )
        rows, _ = load_configured(DatasetConfig(tasks=tasks))
        lines = []
        for row in rows:
            right = sorted(row["prompt"].removesuffix("="))
            wrong = rng.sample(right, len(right))
            if wrong != right:
                pair = {"chosen": "".join(right), "rejected": "".join(wrong)}
                lines.append(json.dumps({"prompt": row["prompt"], **pair}))
        files[part] = folder / f"{part}.jsonl"
        files[part].write_text("\n".join(lines))
    return {"train": str(files["train"]), "validation": str(files["held_out"])}


def reward_model(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
    """Distinguish digits in order from digits in another order."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = {
        "policy": {
            "max_total_sequence_length": 16,
            "train_global_batch_size": 128,
            "train_micro_batch_size": 256,
            "optimizer": {"kwargs": {"lr": 2e-3, "betas": [0.9, 0.99]}},
            "scheduler": {"warmup_steps": 10},
        },
        "data": orders(folder, seed),
        "rm": {
            "max_num_steps": NUM_STEPS,
            "val_period": NUM_STEPS // 10,
            "val_at_start": True,
            "val_at_end": True,
            "val_global_batch_size": 512,
            "val_batches": None,
        },
        "checkpointing": {"enabled": False},
    }
    result = train("rm", with_model(settings, start), folder / "run", seed, pool)
    return curve_of(result, "val:accuracy")
