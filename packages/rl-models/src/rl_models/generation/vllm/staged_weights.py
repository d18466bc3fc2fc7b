"""Weights that a rank has verified, and keeps until the whole replica takes them.

```
leader:    receive, verify -> ask all ranks --all have them--> pause, load on all, go on
follower:  receive, verify -> offer ......................... load --> offer() returns
                          \\-> refuse, and nobody loads
```
"""

from __future__ import annotations

import threading
from typing import Any

from rl_models.errors import WeightSyncError

__all__ = ["StagedWeights"]


class StagedWeights:
    """What a rank that follows has of the update that is going on.

    Updates are told apart by their number: all ranks of a replica are asked for the
    same ones, whatever becomes of them.

    Args:
        deadline_s: How long the leader may take once the weights are here.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._number = 0
        self._file: tuple[str, Any] | None = None
        self._refusal = ""
        self._outcome: str | None = None
        self._dropped = (-1, "")

    def begin(self) -> None:
        """Another update begins."""
        with self._changed:
            self._number += 1
            self._file = self._outcome = None
            self._refusal = ""

    def refuse(self, problem: str) -> None:
        """Note that the weights of this update are not right."""
        with self._changed:
            self._refusal = problem

    def offer(self, file: tuple[str, Any]) -> None:
        """Have weights loaded from a file, and wait until they are.

        Args:
            file: Arguments of `WeightExtension.rl_load_file`.

        Raises:
            WeightSyncError: They are not, as another rank has no weights, or these
                cannot be loaded.
        """
        with self._changed:
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
        """Return what is wrong with the weights of an update.

        None: they have not all come.
        """
        with self._changed:
            if self._number > number:
                return f"update {number} of this rank has ended already"
            if self._number < number:
                return None
            return self._refusal or (None if self._file is None else "")

    def file(self) -> tuple[str, Any]:
        """Return what was offered.

        Raises:
            WeightSyncError: Nothing is.
        """
        with self._changed:
            if self._file is None:
                raise WeightSyncError("the rank has no weights to load")
            return self._file

    def loaded(self, problem: str) -> None:
        """They were loaded, or what was wrong with them."""
        self._end(problem)

    def drop(self, number: int, problem: str) -> None:
        """Nobody loads the weights of an update, for this reason."""
        with self._changed:
            self._dropped = (number, problem)
            if self._number == number:
                self._end(problem)

    def _end(self, problem: str) -> None:
        with self._changed:
            self._outcome = problem
            self._changed.notify_all()
