"""TRL's trainers, stepping in turn with ours."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternate import Baton
from benchmarks.workload import Workload, reward

os.environ.setdefault("WANDB_DISABLED", "true")
SIDE = "trl"


def grpo(
    work: Workload, model: Path, rows: list[dict[str, str]], steps: int, threads: int,
    baton: Baton, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Train `steps` steps by TRL's GRPOTrainer; returns its last log entry."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=work.num_samples,
        num_generations=work.num_generations,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens} if work.fixed else None,
        beta=0.0,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        max_steps=steps,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=max(steps, 1),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[_turns(baton)],
    )
    try:
        trainer.train()
    finally:
        baton.leave(SIDE)
    return dict(trainer.state.log_history[-2])


def sft(
    model: Path, rows: list[dict[str, str]], batch_size: int, steps: int, threads: int,
    baton: Baton, folder: Path,
) -> None:  # fmt: skip
    """Train `steps` steps by TRL's SFTTrainer on prompt/completion rows."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(threads)
    config = SFTConfig(
        output_dir=str(folder / "trl-sft"),
        per_device_train_batch_size=batch_size,
        learning_rate=1e-6,
        max_steps=steps,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=max(steps, 1),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    pairs = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=config,
        train_dataset=Dataset.from_list(pairs),
        callbacks=[_turns(baton)],
    )
    try:
        trainer.train()
    finally:
        baton.leave(SIDE)


def dpo(
    model: Path, rows: list[dict[str, str]], batch_size: int, steps: int, threads: int,
    baton: Baton, folder: Path,
) -> None:  # fmt: skip
    """Train `steps` steps by TRL's DPOTrainer; the reference is asked in each step."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(threads)
    config = DPOConfig(
        output_dir=str(folder / "trl-dpo"),
        per_device_train_batch_size=batch_size,
        learning_rate=1e-6,
        max_length=256,
        max_steps=steps,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=max(steps, 1),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        ref_model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[_turns(baton)],
    )
    try:
        trainer.train()
    finally:
        baton.leave(SIDE)


def _turns(baton: Baton) -> Any:
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            baton.take(SIDE)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            baton.give(SIDE)

    return Turns()
