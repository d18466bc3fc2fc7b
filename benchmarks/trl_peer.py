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
    """Train `steps` steps with TRL's GRPOTrainer; return its last log entry."""
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        **_settings(folder / "trl", steps),
        per_device_train_batch_size=work.num_samples,
        num_generations=work.num_generations,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens} if work.fixed else None,
        beta=0.0,
        max_grad_norm=1.0,
    )
    trainer = _train(
        GRPOTrainer, config, model, [{"prompt": row["prompt"]} for row in rows],
        threads, baton,
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
    )  # fmt: skip
    return dict(trainer.state.log_history[-2])


def sft(
    model: Path, rows: list[dict[str, str]], batch_size: int, steps: int, threads: int,
    baton: Baton, folder: Path,
) -> None:  # fmt: skip
    """Train `steps` steps with TRL's SFTTrainer on prompt/completion rows."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        **_settings(folder / "trl-sft", steps), per_device_train_batch_size=batch_size
    )
    pairs = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    _train(SFTTrainer, config, model, pairs, threads, baton)


def dpo(
    model: Path, rows: list[dict[str, str]], batch_size: int, steps: int, threads: int,
    baton: Baton, folder: Path,
) -> None:  # fmt: skip
    """Train `steps` steps with TRL's DPOTrainer; the reference runs in each step."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        **_settings(folder / "trl-dpo", steps),
        per_device_train_batch_size=batch_size,
        max_length=256,
    )
    reference = _load(model)
    _train(DPOTrainer, config, model, rows, threads, baton, ref_model=reference)


def _settings(folder: Path, steps: int) -> dict[str, Any]:
    """Return the settings shared by all three peers."""
    return {
        "output_dir": str(folder),
        "learning_rate": 1e-6,
        "max_steps": steps,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": max(steps, 1),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }


def _train(
    trainer_class: Any, config: Any, model: Path, rows: list[dict[str, str]],
    threads: int, baton: Baton, **parts: Any,
) -> Any:  # fmt: skip
    """Train a model on rows, alternating with the other side; return the trainer."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoTokenizer

    torch.set_num_threads(threads)
    trainer = trainer_class(
        model=_load(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[_turns(baton)],
        **parts,
    )
    try:
        trainer.train()
    finally:
        baton.leave(SIDE)
    return trainer


def _load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


def _turns(baton: Baton) -> Any:
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            baton.take(SIDE)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            baton.give(SIDE)

    return Turns()
