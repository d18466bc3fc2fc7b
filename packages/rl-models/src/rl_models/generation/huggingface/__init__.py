"""Batched sampling with a static key-value cache on Hugging Face models."""

from __future__ import annotations

from rl_models.generation.huggingface.backend import HuggingFaceGenerationBackend

__all__ = ["HuggingFaceGenerationBackend"]
