"""Calls that run concurrently, and one that must run alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rl_distributed.errors import DeadlineExceededError

__all__ = ["Uses"]


class Uses:
    """Lets calls run concurrently, and has an exclusive one wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Make a call, after the end of an exclusive one."""
        # `alone` keeps the lock for its whole block, which is what makes calls wait.
        with self._changed:
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, deadline_s: float) -> Iterator[None]:
        """Wait for running calls; later ones wait for the end of the block.

        Raises:
            DeadlineExceededError: The running calls did not end in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_calls, deadline_s):
                raise DeadlineExceededError(
                    f"{self._num_calls} calls of generate did not end within "
                    f"{deadline_s:g} s, so the number of replicas stays what it was"
                )
            yield
