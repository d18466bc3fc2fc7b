"""Sampling by servers behind an address, which speak OpenAI's completions.

```
rows -> requests, one each, to the least busy address -> tokens and log-probs -> rows
weights -> a model folder -> each server loads it, and confirms the version
```
The backend is imported on first use: a driver that only starts workers asks `Traits`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_models.generation.openai.traits import Traits

if TYPE_CHECKING:
    from rl_models.generation.openai.backend import OpenAIGenerationBackend

__all__ = ["OpenAIGenerationBackend", "Traits"]


def __getattr__(name: str) -> Any:
    if name != "OpenAIGenerationBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.backend").OpenAIGenerationBackend
