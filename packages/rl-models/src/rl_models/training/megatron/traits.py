"""Traits of the backend `megatron` for the driver, which has no Megatron-core."""

from __future__ import annotations

import importlib

from rl_models.config import PolicyConfig
from rl_models.training.traits import TrainingTraits

__all__ = ["Traits"]


class Traits(TrainingTraits):
    """Abilities of `MegatronTrainingBackend`."""

    parallel_axes = ("tensor", "pipeline", "expert")
    worker_class = "rl_models.training.megatron.worker.MegatronTrainingWorker"

    @staticmethod
    def stages_outermost(config: PolicyConfig) -> bool:
        """Return True if ranks with other rows share experts within a stage.

        Megatron-core cuts the ranks for experts and for the rest in other ways, and
        expects the stages to be the same ranks in both.
        """
        return config.parallelism.expert > 1 and config.parallelism.pipeline > 1

    @staticmethod
    def check_config(config: PolicyConfig) -> None:
        """Check optimizer, schedule, model, and settings that are not supported.

        Raises:
            ConfigError: A setting cannot work.
            UnsupportedModelError: The model in this folder cannot be trained.
        """
        home = importlib.import_module("rl_models.training.megatron.backend")
        home.MegatronTrainingBackend.check_config(config)
