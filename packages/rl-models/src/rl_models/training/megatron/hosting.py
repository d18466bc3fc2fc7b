"""What the driver must know to start workers of `megatron`; imports nothing."""

from __future__ import annotations

__all__ = ["has_adapters", "parallel_axes", "worker_class"]

parallel_axes = ("tensor", "pipeline")
"""Axes of `policy.parallelism` besides `data` that the backend has."""

has_adapters = False
"""Whether the backend trains `policy.lora`."""

worker_class = "rl_models.training.megatron.worker.MegatronTrainingWorker"
"""Worker class that hosts this backend; its environment provides Megatron-core."""
