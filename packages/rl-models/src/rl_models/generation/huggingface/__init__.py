"""Batched sampling with a static key-value cache on Hugging Face models.

The backend is imported on first use: a driver that only starts workers asks `Traits`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_models.generation.huggingface.traits import Traits

if TYPE_CHECKING:
    from rl_models.generation.huggingface.backend import HuggingFaceGenerationBackend

__all__ = ["HuggingFaceGenerationBackend", "Traits"]


def __getattr__(name: str) -> Any:
    if name != "HuggingFaceGenerationBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").HuggingFaceGenerationBackend
