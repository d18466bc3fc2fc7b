"""A recipe small enough for tests: it trains in seconds and has every phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles

TASKS = {"world": "sorting", "settings": {"num_digits": 3}}


def recipe(**stages: dict[str, Any]) -> dict[str, Any]:
    """Return a warm-up and a GRPO stage on three digits; `stages` overrides keys."""
    common = {
        "policy": {
            "max_total_sequence_length": 12,
            "generation": {"max_new_tokens": 5},
            "optimizer": {"kwargs": {"lr": 1e-3}},
        },
        "data": {"validation": {"tasks": {**TASKS, "part": "held_out", "num_rows": 8}}},
        "env": {"name": "sorting", "settings": {"credit": "positions"}},
        "cluster": {"workers_per_node": 1, "use_gpus": False},
        "checkpointing": {"save_period": 2, "keep_latest_k": 3},
    }
    warmup = {
        "algorithm": "sft",
        "policy": {"train_global_batch_size": 8, "train_micro_batch_size": 4},
        "data": {
            "train": {"tasks": {**TASKS, "part": "demonstrations", "num_rows": 40}}
        },
        "sft": {"max_num_steps": 4, "val_period": 2},
    }
    grpo = {
        "algorithm": "grpo",
        "policy": {"train_micro_batch_size": 8},
        "data": {"train": {"tasks": {**TASKS, "part": "train", "num_rows": 60}}},
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": 4,
            "val_period": 2,
            "val_at_start": True,
        },
    }
    warmup |= stages.get("warmup", {})
    grpo |= stages.get("grpo", {})
    return {
        "title": "a small run",
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "tokenizer": {"characters": "0123456789="},
        },
        "common": common,
        "stages": {"warmup": warmup, "grpo": grpo},
        "report": {"num_samples": 2},
    }


def long_grpo(**changes: Any) -> dict[str, Any]:
    """Return a run whose GRPO stage is long enough to be killed in."""
    data = recipe()
    data["stages"]["grpo"]["grpo"] |= {"max_num_steps": 6, **changes}
    data["stages"]["grpo"]["checkpointing"] = {"save_period": 2, "keep_latest_k": 9}
    return data


def write_recipe(folder: Path, data: dict[str, Any]) -> str:
    """Write a recipe and return its path."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)


def check_kept_logprobs(stage: Path, *, num_answers: int) -> None:
    """Check that kept answers have the trainer's log-probs, close to their own.

    Args:
        stage: Folder of a stage that samples.
        num_answers: Number of answers that it has kept.
    """
    answers = list(RolloutFiles(stage, 0).read())
    assert len(answers) == num_answers
    for record in answers:
        assert len(record["trainer_logprobs"]) == record["length"] > 0
        fits = pytest.approx(record["logprobs"], abs=1e-3)
        assert record["trainer_logprobs"] == fits
