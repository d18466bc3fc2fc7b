"""Generation by the vLLM engine, in an environment of its own.

Names are imported on first use. Nothing here imports vllm before an engine is built, so
a driver without it reads the settings and starts the workers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_models.generation.vllm.backend import VllmGenerationBackend
    from rl_models.generation.vllm.config import VllmConfig
    from rl_models.generation.vllm.engine_args import engine_args, engine_variables

__all__ = ["VllmConfig", "VllmGenerationBackend", "engine_args", "engine_variables"]

_MODULES = {
    "VllmConfig": "config",
    "VllmGenerationBackend": "backend",
    "engine_args": "engine_args",
    "engine_variables": "engine_args",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
