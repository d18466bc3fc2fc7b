"""The worker of one rank of `megatron`; its module selects its environment."""

from __future__ import annotations

from rl_models.training.worker import TrainingWorker

__all__ = ["MegatronTrainingWorker"]


class MegatronTrainingWorker(TrainingWorker):
    """A `TrainingWorker` in an environment that has Megatron-core."""
