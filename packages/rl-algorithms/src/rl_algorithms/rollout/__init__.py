"""Rollouts: prompts in, scored token rows out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.rollout.config import RolloutConfig
    from rl_algorithms.rollout.engine import RolloutEngine
    from rl_algorithms.rollout.result import Outcome, RolloutResult, RolloutSample

__all__ = [
    "Outcome",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutResult",
    "RolloutSample",
]

_MODULES = {
    "Outcome": "result",
    "RolloutConfig": "config",
    "RolloutEngine": "engine",
    "RolloutResult": "result",
    "RolloutSample": "result",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
