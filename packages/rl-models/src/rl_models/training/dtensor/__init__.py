"""Any Hugging Face causal LM, sharded with FSDP2 over gloo (CPU) or NCCL (GPU).

The backend is imported on first use, so that a driver can look at settings without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_models.training.dtensor.traits import Traits

if TYPE_CHECKING:
    from rl_models.training.dtensor.backend import DTensorTrainingBackend

__all__ = ["DTensorTrainingBackend", "Traits"]


def __getattr__(name: str) -> Any:
    if name != "DTensorTrainingBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").DTensorTrainingBackend
