"""The operations of a training step, and the peak rates of GPUs.

A training step counts the operations that the model needs, regardless of recomputation
and padding (PaLM, Chowdhery et al., arXiv:2204.02311, appendix B):

    sum over rows of  6 N n + 12 L H Q n^2

with n tokens in the row, N parameters that take part in a matrix product (the embedding
table is only read), L layers, and H heads of Q dimensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["PEAK_TFLOPS", "ModelFlops", "gpu_peak_tflops"]

# Dense bfloat16 peaks from the vendors' data sheets. The first key contained in the
# device's name as whole words counts, so longer names precede their prefixes ("H100
# PCIe", "H100").
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.5,
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
        lengths_B = np.asarray(lengths, dtype=np.float64)
        tokens, squares = float(lengths_B.sum()), float(np.square(lengths_B).sum())
        return 6 * self.matmul_parameters * tokens + 12 * self.attention_width * squares


def gpu_peak_tflops(name: str) -> float | None:
    """Return the peak of the GPU of this name (torch's), or None for unknown ones."""
    for part, peak in PEAK_TFLOPS.items():
        # Whole words only: an A10G or an RTX A1000 has another peak than A10 and A100.
        if re.search(rf"\b{re.escape(part)}(?![A-Za-z0-9])", name):
            return peak
    return None
