"""Our trainers, through the public API and Ray, stepping in turn with a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rl_algorithms as rl
from benchmarks.alternate import Baton
from benchmarks.workload import Workload, reward

SIDE = "ours"


class Turns(rl.Callback):
    """Takes the baton when a step begins, and passes it when the step ends."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton

    def on_step_begin(self, *args: Any) -> None:
        self.baton.take(SIDE)

    def on_step_end(self, *args: Any) -> None:
        self.baton.give(SIDE)


def grpo(
    work: Workload, model: Path, rows: list[dict[str, str]], steps: int, workers: int,
    baton: Baton, folder: Path,
) -> dict[str, float]:  # fmt: skip
    """Train `steps` steps with our GRPOTrainer; return its last metrics."""
    generation: dict[str, Any] = {"max_new_tokens": work.new_tokens}
    if work.fixed:
        generation["stop_token_ids"] = []
    tokens = work.num_samples * (work.prompt_lengths[1] + work.new_tokens)
    policy: dict[str, Any] = {
        "max_total_sequence_length": 256,
        "train_micro_batch_size": work.num_samples // workers,
        "optimizer": {"kwargs": {"lr": 1e-6}},
        "generation": generation,
    }
    if not work.fixed:
        policy["sequence_packing"] = {
            "train_mb_tokens": max(tokens // workers // 4, 4096),
            "logprob_mb_tokens": 4096,
        }
    trainer = rl.GRPOTrainer.from_pretrained(
        str(model),
        policy=policy,
        num_prompts_per_step=work.num_prompts,
        num_generations_per_prompt=work.num_generations,
        max_num_steps=steps,
        cluster={"workers_per_node": workers, "use_gpus": False},
        checkpointing={"enabled": False},
        loss_fn={"reference_policy_kl_penalty": 0.0},
        val_period=0,
        output_dir=str(folder / "ours"),
        seed=1,
    )
    try:
        result = trainer.fit(
            dataset=[{"prompt": row["prompt"]} for row in rows],
            reward_fn=lambda prompt, response: reward(response),
            callbacks=[Turns(baton)],
        )
    finally:
        baton.leave(SIDE)
    return dict(result.metrics)


def sft(
    model: Path, rows: list[dict[str, str]], batch_size: int, steps: int, workers: int,
    baton: Baton | None, folder: Path, lr: float = 1e-6,
) -> Path | None:  # fmt: skip
    """Train `steps` steps with our SFTTrainer; return the model if it was kept."""
    trainer = rl.SFTTrainer.from_pretrained(
        str(model),
        policy={
            "max_total_sequence_length": 256,
            "train_global_batch_size": batch_size,
            "train_micro_batch_size": batch_size // workers,
            "sequence_packing": {"train_mb_tokens": 8192, "logprob_mb_tokens": 8192},
            "optimizer": {"kwargs": {"lr": lr}},
        },
        max_num_steps=steps,
        cluster={"workers_per_node": workers, "use_gpus": False},
        checkpointing={"enabled": baton is None},
        val_period=0,
        output_dir=str(folder / "ours-sft"),
        seed=1,
    )
    try:
        result = trainer.fit(
            dataset=rows, callbacks=[] if baton is None else [Turns(baton)]
        )
    finally:
        if baton is not None:
            baton.leave(SIDE)
    return result.model_path


def dpo(
    model: Path, rows: list[dict[str, str]], batch_size: int, steps: int, workers: int,
    baton: Baton, folder: Path,
) -> None:  # fmt: skip
    """Train `steps` steps with our DPOTrainer; the reference runs in each step."""
    trainer = rl.DPOTrainer.from_pretrained(
        str(model),
        policy={
            "max_total_sequence_length": 256,
            "train_global_batch_size": batch_size,
            "train_micro_batch_size": 2 * batch_size // workers,
            "sequence_packing": {"train_mb_tokens": 8192, "logprob_mb_tokens": 8192},
            "optimizer": {"kwargs": {"lr": 1e-6}},
        },
        precompute_reference_logprobs=False,
        max_num_steps=steps,
        cluster={"workers_per_node": workers, "use_gpus": False},
        checkpointing={"enabled": False},
        val_period=0,
        output_dir=str(folder / "ours-dpo"),
        seed=1,
    )
    try:
        trainer.fit(dataset=rows, callbacks=[Turns(baton)])
    finally:
        baton.leave(SIDE)
