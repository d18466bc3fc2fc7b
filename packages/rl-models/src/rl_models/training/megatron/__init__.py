"""Causal LMs of Megatron-core, with tensor and data parallelism.

It runs in an environment of its own (`rl-models[megatron]`), which its workers are
started in. The driver has none of Megatron-core, and looks at settings without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_models.training.megatron.traits import Traits

if TYPE_CHECKING:
    from rl_models.training.megatron.backend import MegatronTrainingBackend

__all__ = ["MegatronTrainingBackend", "Traits"]


def __getattr__(name: str) -> Any:
    if name != "MegatronTrainingBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").MegatronTrainingBackend
