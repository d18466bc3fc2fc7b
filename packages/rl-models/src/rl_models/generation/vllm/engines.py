"""The ways to run vLLM inside a worker: `LLM` and `AsyncLLM`.

| engine            | process of the model    | weights arrive      | rows in flight |
|-------------------|-------------------------|---------------------|----------------|
| `SyncEngine`      | this one, on one GPU    | as tensors          | finish first   |
| `AsyncEngine`     | one of its own          | as a file in memory | go on          |
| `FollowingEngine` | this one, led by the    | as a file in memory | are the        |
|                   | `AsyncEngine` of rank 0 |                     | leader's       |
"""

from __future__ import annotations

from typing import Any

from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.engine import Engine
from rl_models.generation.vllm.sync_engine import SyncEngine

__all__ = ["build_engine"]


def build_engine(
    arguments: dict[str, Any],
    *,
    is_async: bool,
    place: ReplicaRank | None = None,
    update_deadline_s: float = 600.0,
) -> Engine:
    """Build an engine, in a process whose environment variables are set already.

    Args:
        arguments: Arguments of vLLM's `EngineArgs`.
        is_async: `AsyncLLM` in place of `LLM`.
        place: The rank of this process in a tensor-parallel replica.
        update_deadline_s: How long the ranks of a replica may wait for each other in a
            weight update.
    """
    if not is_async:
        return SyncEngine(arguments, place)
    if place is None or place.leads:
        from rl_models.generation.vllm.async_engine import (  # noqa: PLC0415
            AsyncEngine,
        )

        return AsyncEngine(arguments, place, update_deadline_s)
    from rl_models.generation.vllm.following_engine import (  # noqa: PLC0415
        FollowingEngine,
    )

    return FollowingEngine(arguments, place, update_deadline_s)
