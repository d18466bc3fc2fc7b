"""Throughput of a step, and the model FLOPs utilization (MFU) of training.

The operations of a training step are those that the model needs, regardless of
recomputation and padding (PaLM, Chowdhery et al., arXiv:2204.02311, appendix B):

    sum over rows of  6 N n + 12 L H Q n^2

with n tokens in the row, N parameters that take part in a matrix product (the embedding
table is only read), L layers, and H heads of Q dimensions. The utilization divides them
by the time of `policy_training` and by the peak rate of all training workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_distributed.logs.logging import get_logger
from rl_models.model_traits import PolicyTraits

__all__ = ["PEAK_TFLOPS", "ModelFlops", "Throughput", "peak_tflops"]

_logger = get_logger(__name__)

# Dense bfloat16 peaks from the vendors' data sheets. The first key contained in the
# device's name counts, so longer names precede their prefixes ("H100 PCIe", "H100").
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
    "MI250": 362.1,
}
_GATED = {"gemma", "gemma2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"}
_EXPERTS = {"mixtral", "qwen3_moe"}


@dataclass(frozen=True)
class ModelFlops:
    """Number of operations of a training step of a decoder."""

    matmul_parameters: int
    """Number of parameters multiplied with each token; of experts, the active ones."""
    attention_width: int
    """Layers x heads x dimensions of a head."""

    @classmethod
    def of(cls, config: Any) -> ModelFlops | None:
        """Read a Hugging Face configuration; return None for unknown architectures."""
        kind = str(config.model_type)
        # The formula assumes gated MLPs; a wrong count would look like a measurement.
        if kind not in _GATED | _EXPERTS:
            return None
        hidden, layers = config.hidden_size, config.num_hidden_layers
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        pairs = getattr(config, "num_key_value_heads", None) or heads
        attention = 2 * hidden * head_dim * (heads + pairs)
        inner = config.intermediate_size
        mlp = 3 * hidden * inner
        if kind in _EXPERTS:
            experts = getattr(config, "num_experts", None) or config.num_local_experts
            inner = getattr(config, "moe_intermediate_size", None) or inner
            mlp = 3 * hidden * inner * config.num_experts_per_tok + hidden * experts
        # The last term is the output layer; an input embedding is looked up, not
        # multiplied.
        total = layers * (attention + mlp) + hidden * config.vocab_size
        return cls(total, layers * heads * head_dim)

    def training(self, lengths: Any) -> float:
        """Return the operations, forward and backward, for rows of these lengths."""
        # float64, because sums of squared lengths exceed what float32 holds exactly.
        lengths_B = torch.as_tensor(lengths, dtype=torch.float64)
        tokens, squares = float(lengths_B.sum()), float(lengths_B.square().sum())
        return 6 * self.matmul_parameters * tokens + 12 * self.attention_width * squares


def peak_tflops(config: TrainerConfig) -> float | None:
    """Return the configured peak rate of a worker, that of the local GPU, or None."""
    if config.peak_tflops_per_worker is not None:
        return config.peak_tflops_per_worker
    if config.policy.precision != "bfloat16" or not torch.cuda.is_available():
        return None
    # The driver's GPU stands for those of the workers.
    name = torch.cuda.get_device_name(0)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


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
