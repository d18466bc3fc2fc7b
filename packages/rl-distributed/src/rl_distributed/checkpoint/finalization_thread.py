"""A thread that finalizes checkpoints, one at a time.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | | tmp folder | `wait` | the thread, or its deadline |
| thread | tmp folder | step folder | an asynchronous save | its return |
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from pathlib import Path

from rl_distributed.errors import DeadlineExceededError

__all__ = ["FinalizationThread"]


class FinalizationThread:
    """Finalizes at most one checkpoint in the background; started when needed.

    Args:
        folder: Folder of the checkpoints, for messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._executor: futures.ThreadPoolExecutor | None = None
        self._pending: futures.Future[Path] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint was handed over and not waited for yet."""
        return self._pending is not None

    def begin(self, finalize: Callable[[], Path]) -> None:
        """Run `finalize` in the thread; none may be pending."""
        if self._executor is None:
            # One thread suffices, because a pending checkpoint is
            # finished before the next.
            self._executor = futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending = self._executor.submit(finalize)

    def wait(self, deadline_s: float) -> Path | None:
        """Return what the pending `finalize` returns, or raise what it raises.

        Returns:
            The step folder; None if nothing is pending.

        Raises:
            DeadlineExceededError: It is not finished in time; it stays pending.
        """
        if self._pending is None:
            return None
        # `result(timeout=...)` would not tell a deadline that has passed from a
        # TimeoutError of the work itself.
        if not futures.wait([self._pending], timeout=deadline_s).done:
            raise DeadlineExceededError(
                f"waited {deadline_s:g} s for the pending checkpoint in "
                f"{self._folder}; it is still being written"
            )
        finished, self._pending = self._pending, None
        return finished.result()

    def end(self) -> None:
        """End the thread without waiting for it."""
        if self._executor is not None:
            # After a deadline, it may still be stuck in an asynchronous save.
            self._executor.shutdown(wait=False)
            self._executor = None
