"""Cancellation of calls: let a running method find out that it was cancelled."""

from __future__ import annotations

import sys
from typing import Any

from rl_distributed.errors import CallCancelledError

__all__ = ["current_call", "is_cancelled", "note_cancelled", "stop_if_cancelled"]

# Ray's ids of calls of this process that were cancelled, also before they came here.
# Ray's own flag is not used: it may miss a call that is on its way, and stay set for
# the next one.
_cancelled: set[str] = set()


def note_cancelled(task_id: str) -> None:
    """Note that a call of this process was cancelled; for the host."""
    _cancelled.add(task_id)


def current_call() -> str:
    """Ray's id of the call that this thread works on; empty outside of a worker."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return ray.get_runtime_context().get_task_id() or ""


def is_cancelled() -> bool:
    """Whether the call that this thread works on was cancelled by its caller.

    A long method checks this now and then and returns early. Always False outside of a
    worker, so that a worker class can be used without one. It takes microseconds.
    """
    return bool(_cancelled) and current_call() in _cancelled


def stop_if_cancelled() -> None:
    """Leave the running method if its call was cancelled.

    Raises:
        CallCancelledError: it was.
    """
    if is_cancelled():
        raise CallCancelledError("the call was cancelled by its caller")
