"""Groups of worker processes: made, called by named axes, and ended together."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_distributed.failures.worker import WorkerFailure, WorkerHealth
    from rl_distributed.workers.builder import RayWorkerBuilder
    from rl_distributed.workers.cancellation import is_cancelled, stop_if_cancelled
    from rl_distributed.workers.future import MultiWorkerFuture, WorkerResult
    from rl_distributed.workers.group import RayWorkerGroup
    from rl_distributed.workers.options import WorkerOptions, recursive_merge_options
    from rl_distributed.workers.policy import (
        FailFast,
        FailurePolicy,
        RestartGroup,
        RestartWorker,
    )

__all__ = [
    "FailFast",
    "FailurePolicy",
    "MultiWorkerFuture",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "RestartGroup",
    "RestartWorker",
    "WorkerFailure",
    "WorkerHealth",
    "WorkerOptions",
    "WorkerResult",
    "is_cancelled",
    "recursive_merge_options",
    "stop_if_cancelled",
]

# Loaded on first use: a worker's process imports this package too, and needs little.
_MODULES = {
    "FailFast": "rl_distributed.workers.policy",
    "FailurePolicy": "rl_distributed.workers.policy",
    "MultiWorkerFuture": "rl_distributed.workers.future",
    "RayWorkerBuilder": "rl_distributed.workers.builder",
    "RayWorkerGroup": "rl_distributed.workers.group",
    "RestartGroup": "rl_distributed.workers.policy",
    "RestartWorker": "rl_distributed.workers.policy",
    "WorkerFailure": "rl_distributed.failures.worker",
    "WorkerHealth": "rl_distributed.failures.worker",
    "WorkerOptions": "rl_distributed.workers.options",
    "WorkerResult": "rl_distributed.workers.future",
    "is_cancelled": "rl_distributed.workers.cancellation",
    "recursive_merge_options": "rl_distributed.workers.options",
    "stop_if_cancelled": "rl_distributed.workers.cancellation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
