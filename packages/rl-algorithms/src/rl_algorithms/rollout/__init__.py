"""Rollouts: prompts in, scored token rows out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.rollout.branches import Branch, unfold_branches
    from rl_algorithms.rollout.config import (
        RetryConfig,
        RolloutConfig,
        RolloutSettings,
    )
    from rl_algorithms.rollout.engine import RolloutEngine
    from rl_algorithms.rollout.result import Outcome, RolloutResult, RolloutSample
    from rl_algorithms.rollout.retries import ConfiguredRetry, RetryPolicy
    from rl_algorithms.rollout.timeline import Timeline
    from rl_algorithms.rollout.versions import mark_stale, staleness

__all__ = [
    "Branch",
    "ConfiguredRetry",
    "Outcome",
    "RetryConfig",
    "RetryPolicy",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutResult",
    "RolloutSample",
    "RolloutSettings",
    "Timeline",
    "mark_stale",
    "staleness",
    "unfold_branches",
]

_MODULES = {
    "Branch": "branches",
    "ConfiguredRetry": "retries",
    "Outcome": "result",
    "RetryConfig": "config",
    "RetryPolicy": "retries",
    "RolloutConfig": "config",
    "RolloutEngine": "engine",
    "RolloutResult": "result",
    "RolloutSample": "result",
    "RolloutSettings": "config",
    "Timeline": "timeline",
    "mark_stale": "versions",
    "staleness": "versions",
    "unfold_branches": "branches",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
