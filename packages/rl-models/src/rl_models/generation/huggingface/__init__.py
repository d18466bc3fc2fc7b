"""Batched sampling with a static key-value cache on Hugging Face models.

The backend is imported on first use: a driver that only starts workers asks `Traits`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_models.generation.config import GenerationConfig
    from rl_models.generation.huggingface.backend import HuggingFaceGenerationBackend

__all__ = ["HuggingFaceGenerationBackend", "Traits"]


class Traits:
    """What the backend asks of its workers; for the rest the defaults hold."""

    @staticmethod
    def frees_memory(config: GenerationConfig, *, on_gpu: bool) -> bool:
        """Whether `release_memory` frees anything: the cache, wherever it runs."""
        return True


def __getattr__(name: str) -> Any:
    if name != "HuggingFaceGenerationBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").HuggingFaceGenerationBackend
