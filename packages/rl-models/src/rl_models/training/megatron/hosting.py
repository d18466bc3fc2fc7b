"""What the driver must know to start workers of `megatron`; imports nothing."""

from __future__ import annotations

__all__ = ["parallel_axes", "worker_class"]

parallel_axes = ("tensor", "pipeline")
"""Axes of `policy.parallelism` besides `data` that the backend has."""

worker_class = "rl_models.training.megatron.worker.MegatronTrainingWorker"
"""Worker class that hosts this backend; its environment provides Megatron-core."""
