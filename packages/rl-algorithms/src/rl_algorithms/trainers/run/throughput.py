"""Throughput of a step, and the model FLOPs utilization (MFU) of training.

The utilization divides the operations of the model (`rl_models.planning.flops`) by the
time of `policy_training` and by the peak rate of all training workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_distributed.logs.logging import get_logger
from rl_models.model_traits import PolicyTraits
from rl_models.planning.flops import ModelFlops, gpu_peak_tflops

__all__ = ["Throughput", "peak_tflops"]

_logger = get_logger(__name__)


def peak_tflops(config: TrainerConfig) -> float | None:
    """Return the configured peak rate of a worker, that of the local GPU, or None."""
    if config.peak_tflops_per_worker is not None:
        return config.peak_tflops_per_worker
    if config.policy.precision != "bfloat16" or not torch.cuda.is_available():
        return None
    # The driver's GPU stands for those of the workers.
    return gpu_peak_tflops(torch.cuda.get_device_name(0))


class Throughput:
    """Counts the trained tokens of a run's steps and computes rates per second.

    Args:
        num_workers: Number of training workers.
        flops: Operations of the model; None for no utilization.
        peak: Peak rate of one worker in 10^12 operations per second.
    """

    def __init__(
        self,
        num_workers: int = 1,
        flops: ModelFlops | None = None,
        peak: float | None = None,
    ) -> None:
        self._num_workers = num_workers
        self._flops, self._peak = flops, peak
        self._operations = 0.0

    @classmethod
    def of(cls, config: TrainerConfig, policy: object) -> Throughput:
        """Create the counter; the model's shape is read only if its peak is known."""
        num_workers = PolicyTraits.of(policy).num_ranks or config.num_workers
        peak = peak_tflops(config)
        if peak is None:
            return cls(num_workers)
        name = config.policy.model_name
        flops = ModelFlops.of(AutoConfig.from_pretrained(name))
        if flops is None:
            _logger.warning(
                "the operations of %s are not known: there will be no "
                "performance:train_fp_utilization",
                name,
            )
        return cls(num_workers, flops, peak)

    def note_trained(self, rows: Mapping[str, Any]) -> None:
        """Count trained rows, without padding rows."""
        if self._flops is not None:
            lengths_B = rows["input_lengths"][rows["sample_mask"] != 0]
            self._operations += self._flops.training(lengths_B)

    def take(
        self, metrics: Mapping[str, float], timing: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the rates of a step, and begin the next one.

        Args:
            metrics: Metrics of the step, without prefix.
            timing: Seconds of its phases.
        """
        operations, self._operations = self._operations, 0.0
        step_s = timing.get("total_step_time")
        tokens, training_s = metrics.get("num_tokens"), timing.get("policy_training")
        logprobs_s = timing.get("policy_and_reference_logprobs")
        rates = {
            "samples_per_sec": (metrics.get("num_samples"), step_s),
            "tokens_per_sec": (tokens, step_s),
            "generation_tokens_per_sec": (
                metrics.get("num_generated_tokens"),
                timing.get("generation"),
            ),
            "policy_training_tokens_per_sec": (tokens, training_s),
            "policy_and_reference_logprobs_tokens_per_sec": (tokens, logprobs_s),
        }
        figures: dict[str, float] = {}
        for name, (amount, seconds) in rates.items():
            if amount is not None and seconds:
                figures[name] = amount / seconds
                figures[f"{name}_per_worker"] = amount / seconds / self._num_workers
        if self._peak is not None and operations and training_s:
            rate = operations / training_s / self._num_workers
            figures["train_flops_per_worker"] = rate
            figures["train_fp_utilization"] = rate / (self._peak * 1e12)
        return figures
