"""`CallLock`: a lock of an object that may be sent to another process."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["CallLock"]


class CallLock:
    """Lets a number of threads in at a time; a copy is a lock of its own.

    Args:
        num_calls: Their number.
    """

    def __init__(self, num_calls: int = 1) -> None:
        self._num_calls = num_calls
        self._room = threading.Semaphore(num_calls)

    def __enter__(self) -> None:
        self._room.acquire()

    def __exit__(self, *exception: object) -> None:
        self._room.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return CallLock, (self._num_calls,)
