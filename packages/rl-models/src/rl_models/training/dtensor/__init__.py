"""Any Hugging Face causal LM, sharded with FSDP2 over gloo (CPU) or NCCL (GPU)."""

from __future__ import annotations

from rl_models.training.dtensor.backend import DTensorTrainingBackend

__all__ = ["DTensorTrainingBackend"]
