"""Weights that a rank has verified and keeps until the whole replica loads them.

```
leader:    receive, verify -> ask all ranks --all have them--> pause, load, resume
follower:  receive, verify -> offer ......................... load --> offer() returns
                          \\-> refuse, and nobody loads
```
"""

from __future__ import annotations

import threading
from typing import Any

from rl_models.errors import WeightSyncError

__all__ = ["RankWeightUpdate"]


class RankWeightUpdate:
    """State of the current update in a rank that follows.

    Updates are told apart by their number, which all ranks of a replica count alike,
    whether an update succeeds or not.

    Args:
        deadline_s: How long the leader may take once the weights have arrived.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Two threads meet here: the worker's, which receives weights, and that of the
        # engine, which the leader calls.
        self._changed = threading.Condition()
        self._number = 0
        self._file: tuple[str, Any] | None = None
        self._refusal = ""
        self._outcome: str | None = None
        self._dropped = (-1, "")

    def begin(self) -> None:
        """Begin another update."""
        with self._changed:
            self._number += 1
            self._file = self._outcome = None
            self._refusal = ""

    def refuse(self, problem: str) -> None:
        """Record that the weights of this update are not right."""
        with self._changed:
            self._refusal = problem

    def offer(self, file: tuple[str, Any]) -> None:
        """Have weights loaded from a file, and wait until they are.

        Args:
            file: Arguments of `WeightExtension.rl_load_file`.

        Raises:
            WeightSyncError: They are not loaded, because another rank has no weights or
                these do not fit.
        """
        with self._changed:
            # The leader gave the update up before it arrived here, and will not ask
            # again.
            if self._dropped[0] == self._number:
                raise WeightSyncError(self._dropped[1])
            self._file = file
            ended = self._changed.wait_for(
                lambda: self._outcome is not None, self._deadline_s
            )
            self._file = None
            if not ended:
                raise WeightSyncError(
                    f"Rank 0 of the replica did not take the weights within "
                    f"{self._deadline_s:g} s (weight_sync.deadline_s)."
                )
            if self._outcome:
                raise WeightSyncError(self._outcome)

    def state(self, number: int) -> str | None:
        """Return the problem with the weights of an update, or an empty string.

        None if they have not all arrived.
        """
        with self._changed:
            # This rank has given up waiting for the leader and begun the next update.
            if self._number > number:
                return f"update {number} of this rank has ended already"
            if self._number < number:
                return None
            return self._refusal or (None if self._file is None else "")

    def file(self) -> tuple[str, Any]:
        """Return the offered file.

        Raises:
            WeightSyncError: Nothing is offered.
        """
        with self._changed:
            if self._file is None:
                raise WeightSyncError("the rank has no weights to load")
            return self._file

    def loaded(self, problem: str) -> None:
        """Record that the weights were loaded, or the problem with them."""
        self._end(problem)

    def drop(self, number: int, problem: str) -> None:
        """Record that no rank loads the weights of an update, and why."""
        with self._changed:
            # Kept beside the outcome: the update may not have begun here yet.
            self._dropped = (number, problem)
            if self._number == number:
                self._end(problem)

    def _end(self, problem: str) -> None:
        # A condition's lock is reentrant: `drop` holds it already.
        with self._changed:
            self._outcome = problem
            self._changed.notify_all()
