"""Sampling in the workers of the training backend `megatron`, with its weights.

No weights are sent or duplicated: the ranks that train a layer decode with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_models.generation.megatron.traits import Traits

if TYPE_CHECKING:
    from rl_models.generation.megatron.backend import MegatronGenerationBackend

__all__ = ["MegatronGenerationBackend", "Traits"]


def __getattr__(name: str) -> Any:
    if name != "MegatronGenerationBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").MegatronGenerationBackend
