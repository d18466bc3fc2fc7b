"""Methods that learn from answers sampled by the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.experiment import (
    Curve,
    Experiment,
    curve_of,
    train,
    with_model,
)
from benchmarks.learning.sorting import NUM_STEPS, Sorting
from rl_algorithms import KeptWorkers
from rl_distributed.config import merge_configs
from rl_envs import EnvironmentReturn
from rl_envs.worlds.sorting.environment import SortingEnvironment

__all__ = ["distillation", "gdpo", "grpo_ahead", "on_sorting", "ppo"]


def on_sorting(
    algorithm: str,
    title: str,
    *,
    num_generations: int = 4,
    num_updates: int = 1,
    **changes: Any,
) -> Experiment:
    """Return the sorting experiment of a member of the GRPO family."""

    def run(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
        start = Sorting.start(folder / "start", seed, pool)
        common = Sorting.sampling(num_generations, num_updates)
        settings = merge_configs(common, changes)
        result = train(
            algorithm, with_model(settings, start), folder / "run", seed, pool
        )
        return curve_of(result, "val:accuracy")

    return Experiment(title, "held-out accuracy", run)


def grpo_ahead(
    folder: Path, seed: int, pool: KeptWorkers, max_staleness: int = 1
) -> Curve:
    """Learn in turns, and the same way with answers sampled ahead of training.

    The learning rate is a third of what suits runs in turns best: with it the policy
    changes so much in a step that answers of the step before are worth little.
    """
    start = Sorting.start(folder / "start", seed, pool)
    changes = {
        "policy": {"optimizer": {"kwargs": {"lr": 5e-4}}},
        "grpo": {"drop_zero_variance_groups": True},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
    }
    settings = merge_configs(with_model(Sorting.sampling(), start), changes)
    turns = train("grpo", settings, folder / "turns", seed, pool)
    ahead = {
        "grpo": {"asynchronous": {"max_staleness": max_staleness}},
        "loss_fn": {"use_importance_sampling_correction": True},
    }
    settings = merge_configs(settings, ahead)
    result = train("grpo", settings, folder / "run", seed, pool)
    level = {"in turns, at the end": turns.metrics["val:accuracy"]}
    return curve_of(result, "val:accuracy", **level)


class TwoRewards(SortingEnvironment):
    """Rewards the right digits in any order, and any six digits in order.

    Only the correct answer earns both; `accuracy` counts it alone.
    """

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        """Judge the last response of each conversation."""
        judged = super().step(message_log_batch, metadata)
        answers = [columns["answer"] for columns in metadata]
        pairs = list(zip(judged.answers or [], answers, strict=True))
        digits = [sorted(given or "") == list(right) for given, right in pairs]
        order = [
            len(given or "") == len(right) and sorted(given or "") == list(given or "")
            for given, right in pairs
        ]
        rewards = {"reward/digits": digits, "reward/order": order}
        return judged._replace(
            rewards={
                name: torch.tensor(values, dtype=torch.float32)
                for name, values in rewards.items()
            }
        )


def gdpo(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
    """Learn from two rewards, each attainable by a wrong answer."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = with_model(Sorting.sampling(), start)
    del settings["env"]
    result = train("gdpo", settings, folder / "run", seed, pool, TwoRewards())
    return curve_of(result, "val:accuracy")


def distillation(
    folder: Path, seed: int, pool: KeptWorkers, max_staleness: int | None = None
) -> Curve:
    """Distil a model trained on many demonstrations into one trained on few.

    The student practises on prompts that neither has seen, with `max_staleness` ahead
    of training.
    """
    start = Sorting.start(folder / "start", seed, pool)
    changes = {
        "policy": {"model_name": str(folder / "start" / "random")},
        "data": {"train": {"tasks": {"num_rows": 12000}}},
        "sft": {
            "max_num_steps": 800,
            "val_period": 50,
            "stop_at_validation_threshold": 0.95,
        },
        "checkpointing": {"save_period": 800},
    }
    lesson = merge_configs(Sorting.stage("warmup"), changes)
    taught = train("sft", lesson, folder / "teacher", seed, pool)
    settings = Sorting.sampling(num_generations=1)
    settings["distillation"] = settings.pop("grpo")
    settings = merge_configs(
        with_model(settings, start),
        {
            "teacher": {"model_name": str(taught.model_path)},
            "distillation": {"topk_logits_k": 8},
            "loss_fn": {"kl_type": "reverse", "bucket_outside_topk": True},
        },
    )
    if max_staleness is not None:
        settings["distillation"]["asynchronous"] = {"max_staleness": max_staleness}
    result = train("distillation", settings, folder / "run", seed, pool)
    return curve_of(result, "val:accuracy", teacher=taught.metrics["val:accuracy"])


def ppo(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
    """Sort better with a critic's values of each token; both start from one model."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = Sorting.sampling()
    settings["ppo"] = settings.pop("grpo")
    passes, rows = 2, 256
    num_updates = NUM_STEPS * passes * 512 // rows
    changes = {
        "policy": {
            "train_global_batch_size": rows,
            "optimizer": {"kwargs": {"lr": 1e-3}},
            "scheduler": {"kwargs": {"total_steps": num_updates}},
        },
        "critic": {"optimizer": {"kwargs": {"lr": 2e-3}}},
        "ppo": {"ppo_epochs": passes, "critic_warmup_steps": 4},
    }
    settings = merge_configs(with_model(settings, start), changes)
    return curve_of(train("ppo", settings, folder / "run", seed, pool), "val:accuracy")
