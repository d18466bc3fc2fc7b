"""The recipe of a soak: a run as by default, with a model that makes steps short."""

from __future__ import annotations

from typing import Any

KINDS = ("synchronous", "asynchronous")
STAGE = "grpo"
SAVE_PERIOD, KEPT_CHECKPOINTS = 50, 3

LINE_FILES = ("metrics.jsonl", "weight_versions.jsonl", "validation_samples.jsonl")
"""Files of a run that keep a line for each step, transfer or held-out answer."""
BOUNDED_PARTS = {"timeline.jsonl": 4 << 20, "rollouts": 1 << 29}
"""Files that fill up to a size: that of the time line and `rollout.kept_max_bytes`."""

PAGE_SERVER, PAGE_SERVER_BYTES = "rl watch", 128 << 20
"""The process that shows a run, and what it may take: it holds the metrics of all steps
and a cache of the up to 150,000 numbers of its page."""


def soak_recipe(kind: str, num_steps: int) -> dict[str, Any]:
    """Return the recipe of one kind of run.

    The only setting that is there for the measurement is `sample_resources_every_s`:
    it reports what the object store holds. Not more often, because the memory of the
    raylet fills up by answering.
    """
    digits = {"num_digits": 6}
    tasks = {"world": "sorting", "settings": digits}
    stage: dict[str, Any] = {
        "algorithm": "grpo",
        "grpo": {
            "num_prompts_per_step": 32,
            "num_generations_per_prompt": 4,
            "max_num_steps": num_steps,
            "max_num_epochs": None,
            "val_period": SAVE_PERIOD,
        },
    }
    if kind == "asynchronous":
        stage["grpo"]["asynchronous"] = {"max_staleness": 1}
        stage["loss_fn"] = {"use_importance_sampling_correction": True}
    return {
        "title": f"{num_steps} {kind} steps",
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "tokenizer": {"characters": "0123456789="},
        },
        "common": {
            "policy": {
                "max_total_sequence_length": 16,
                "train_micro_batch_size": 128,
                "generation": {"max_new_tokens": 8},
                "optimizer": {"kwargs": {"lr": 1e-4}},
            },
            "data": {
                "train": {"tasks": {**tasks, "part": "train", "num_rows": 1600}},
                "validation": {"tasks": {**tasks, "part": "held_out", "num_rows": 16}},
            },
            "env": {"name": "sorting", "settings": {"credit": "positions"}},
            "cluster": {"workers_per_node": 1, "use_gpus": False},
            "checkpointing": {
                "save_period": SAVE_PERIOD,
                "keep_latest_k": KEPT_CHECKPOINTS,
            },
            "logger": {"sample_resources_every_s": 10.0},
        },
        "stages": {STAGE: stage},
    }
