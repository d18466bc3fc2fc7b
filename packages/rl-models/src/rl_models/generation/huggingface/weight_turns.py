"""`WeightTurns`: decoding steps and weight updates of one model alternate.

```
a call of generate    [step][step]......wait......[step][step]     one call at a time
a weight update       receive....wait    [replace]
```

| part | waits for | is unblocked by | deadline |
|---|---|---|---|
| call | an earlier call | its end | `call_deadline_s` |
| step | an update | its end | `update_deadline_s` |
| update | the step at work, an earlier update | its end | `update_deadline_s` |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_distributed.errors import DeadlineExceededError
from rl_models.errors import GenerationError

__all__ = ["WeightTurns"]


class WeightTurns:
    """The weights that a model holds, and who may use or replace them now.

    Args:
        has_weights: Whether the model has weights to sample with.
        call_deadline_s: How long a call may wait for an earlier one.
        update_deadline_s: How long a step may wait for an update, and the other way
            round.
    """

    def __init__(
        self,
        *,
        has_weights: bool = True,
        call_deadline_s: float = 3600.0,
        update_deadline_s: float = 600.0,
    ) -> None:
        self.version = 0
        """Version of the present weights."""
        self._has_weights = has_weights
        self._call_deadline_s = call_deadline_s
        self._update_deadline_s = update_deadline_s
        self._changed = threading.Condition()
        self._is_called = self._is_stepping = self._is_updating = False
        self._num_updates = 0
        """Updates that wait for their turn, or have it."""

    @property
    def is_called(self) -> bool:
        """Whether a call is in progress."""
        return self._is_called

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Sample the rows of a call in the block, alone.

        Args:
            name: Name of the replica, for the error.

        Raises:
            GenerationError: The model has no weights.
        """
        with self._changed:
            self._wait(
                lambda: not self._is_called,
                "a call of generate waited for an earlier one",
                self._call_deadline_s,
            )
            self._wait_for_updates()
            if not self._has_weights:
                raise GenerationError(
                    f"{name} was started without weights, or its last update failed. "
                    "Call WeightSynchronizer.sync_weights() before generate()."
                )
            self._is_called = True
        try:
            yield
        finally:
            with self._changed:
                self._is_called = False
                self._changed.notify_all()

    @contextmanager
    def step(self) -> Iterator[int]:
        """Compute a step of a call in the block; no update begins before its end.

        Yields:
            The version of the weights that it computes with.

        Raises:
            GenerationError: An update has failed meanwhile.
        """
        with self._changed:
            # Updates first, or a step would always begin before the thread of an update
            # wakes up.
            self._wait_for_updates()
            if not self._has_weights:
                raise GenerationError(
                    "rows are not sampled to their end, because a weight update that "
                    "came meanwhile failed. Sync the weights again."
                )
            self._is_stepping = True
        try:
            yield self.version
        finally:
            with self._changed:
                self._is_stepping = False
                self._changed.notify_all()

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Replace the weights in the block; no step begins before its end.

        If the block raises, the model may hold old and new weights, and nothing is
        sampled until an update succeeds.

        Args:
            version: Number of the new weights.
        """
        with self._changed:
            self._num_updates += 1
            try:
                self._wait(
                    lambda: not (self._is_stepping or self._is_updating),
                    "a weight update waited for the end of a decoding step",
                    self._update_deadline_s,
                )
            except DeadlineExceededError:
                self._num_updates -= 1
                self._changed.notify_all()
                raise
            self._is_updating = True
            self._has_weights = False
        try:
            yield
            self._has_weights = True
            self.version = version
        finally:
            with self._changed:
                self._is_updating = False
                self._num_updates -= 1
                self._changed.notify_all()

    def _wait_for_updates(self) -> None:
        self._wait(
            lambda: not self._num_updates,
            "sampling waited for a weight update",
            self._update_deadline_s,
        )

    def _wait(self, holds: Callable[[], bool], what: str, deadline_s: float) -> None:
        if not self._changed.wait_for(holds, deadline_s):
            raise DeadlineExceededError(f"{what} for {deadline_s:g} s")
