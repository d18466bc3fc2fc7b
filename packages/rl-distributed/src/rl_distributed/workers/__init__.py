"""Groups of worker processes: made, called by named axes, and ended together."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_distributed.workers.builder import RayWorkerBuilder
    from rl_distributed.workers.future import MultiWorkerFuture
    from rl_distributed.workers.group import RayWorkerGroup
    from rl_distributed.workers.options import WorkerOptions, recursive_merge_options

__all__ = [
    "MultiWorkerFuture",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "WorkerOptions",
    "recursive_merge_options",
]

# Loaded on first use: a worker's process imports this package too, and needs little.
_MODULES = {
    "MultiWorkerFuture": "rl_distributed.workers.future",
    "RayWorkerBuilder": "rl_distributed.workers.builder",
    "RayWorkerGroup": "rl_distributed.workers.group",
    "WorkerOptions": "rl_distributed.workers.options",
    "recursive_merge_options": "rl_distributed.workers.options",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
