"""The task that all methods learn: sort six digits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.learning.experiment import train, with_model
from rl_algorithms import KeptWorkers
from rl_distributed import load_config
from rl_distributed.config import merge_configs
from rl_models import build_model
from rl_models.build.model import ModelBuildConfig

__all__ = ["NUM_STEPS", "Sorting"]

NUM_STEPS = 120


class Sorting:
    """The task of the quickstart: sort six digits, starting with imitation.

    All methods start from the same weights for the same seed: those of a model that
    imitated 120 demonstrations and sorts about a third of the held-out digits.
    """

    recipe: Mapping[str, Any] = load_config(Path(__file__).with_name("sorting.yaml"))

    @classmethod
    def stage(cls, name: str) -> dict[str, Any]:
        """Return the settings of a stage of the recipe."""
        stage = dict(merge_configs(cls.recipe["common"], cls.recipe["stages"][name]))
        del stage["algorithm"]
        return stage

    @classmethod
    def start(cls, folder: Path, seed: int, pool: KeptWorkers) -> Path:
        """Return the imitation model."""
        model = folder / "random"
        build_model(ModelBuildConfig.from_dict(cls.recipe["model"]), model, seed=seed)
        settings = with_model(cls.stage("warmup"), model)
        result = train("sft", settings, folder / "warmup", seed, pool)
        assert result.model_path is not None
        return Path(result.model_path)

    @classmethod
    def sampling(cls, num_generations: int = 4, num_updates: int = 1) -> dict[str, Any]:
        """Return the settings shared by all methods that sample.

        Args:
            num_generations: Answers to each prompt; a step has 512 in all.
            num_updates: Number of optimizer steps that these are split into.
        """
        shared = {
            "num_prompts_per_step": 512 // num_generations,
            "num_generations_per_prompt": num_generations,
            "max_num_steps": NUM_STEPS,
            "val_period": NUM_STEPS // 10,
            "val_at_start": True,
            "val_at_end": True,
        }
        stage = cls.stage("grpo")
        policy = {
            "train_global_batch_size": 512 // num_updates,
            "scheduler": {"kwargs": {"total_steps": NUM_STEPS * num_updates}},
        }
        kept = {name: stage[name] for name in ("policy", "data", "env", "cluster")}
        changes = {
            "policy": policy,
            "checkpointing": {"enabled": False},
            "grpo": shared,
        }
        return dict(merge_configs(kept, changes))
