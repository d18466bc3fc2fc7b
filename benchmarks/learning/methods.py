"""The methods and worlds that can be measured, by name."""

from __future__ import annotations

from functools import partial

from benchmarks.learning.experiment import Experiment
from benchmarks.learning.pairs import dpo, reward_model
from benchmarks.learning.sampling import distillation, gdpo, grpo_ahead, on_sorting, ppo
from benchmarks.learning.worlds import WORLDS

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    "grpo": on_sorting(
        "grpo",
        "GRPO",
        grpo={"drop_zero_variance_groups": True},
        loss_fn={"reference_policy_kl_penalty": 0.0},
    ),
    "grpo_ahead": Experiment(
        "GRPO that samples up to 1 step ahead",
        "held-out accuracy",
        grpo_ahead,
        algorithm="grpo",
    ),
    # The answer and its end take seven of the eight tokens, and none is too many.
    "dapo": on_sorting(
        "dapo",
        "DAPO",
        grpo={
            "reward_shaping": {"overlong_buffer_fraction": 0.125},
            "dynamic_sampling_max_gen_batches": 20,
        },
    ),
    "drgrpo": on_sorting("drgrpo", "Dr. GRPO"),
    # Their ratios matter only where a batch is used for several steps.
    "gspo": on_sorting("gspo", "GSPO", num_updates=4),
    # CISPO's bound masks no token: it takes smaller steps.
    "cispo": on_sorting(
        "cispo",
        "CISPO",
        num_updates=4,
        policy={"optimizer": {"kwargs": {"lr": 4e-4}}},
    ),
    "rloo": on_sorting("rloo", "RLOO"),
    "reinforce_plus_plus": on_sorting(
        "reinforce_plus_plus", "REINFORCE++", num_generations=1
    ),
    "reinforce_plus_plus_baseline": on_sorting(
        "reinforce_plus_plus_baseline", "REINFORCE++ baseline"
    ),
    "gdpo": Experiment("GDPO, two rewards", "held-out accuracy", gdpo),
    "ppo": Experiment("PPO", "held-out accuracy", ppo),
    "rm": Experiment("Reward model", "held-out pairs in the right order", reward_model),
    "dpo": Experiment("DPO", "held-out pairs in the right order", dpo),
    "distillation": Experiment(
        "On-policy distillation", "held-out accuracy", distillation
    ),
    "distillation_ahead": Experiment(
        "Distillation that samples up to 2 steps ahead",
        "held-out accuracy",
        partial(distillation, max_staleness=2),
        algorithm="distillation",
    ),
    **WORLDS,
}
