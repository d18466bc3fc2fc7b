"""`ReplicaLoad`: the parts that each replica works on, of all calls together.

Calls of several threads share it, so that each begins where there is least to do: one
that looked at its own parts only would send a single row to replica 0 every time.

Shapes: R replicas.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["ReplicaLoad"]


class ReplicaLoad:
    """Counts the parts in flight on each replica.

    Args:
        num_replicas: R.
    """

    def __init__(self, num_replicas: int) -> None:
        self._lock = threading.Lock()
        # An array: the minimum over 1,024 replicas takes microseconds, for each part.
        self._counts_R = np.zeros(num_replicas, np.int64)

    @property
    def counts(self) -> list[int]:
        """Number of parts in flight, by replica."""
        with self._lock:
            counts: list[int] = self._counts_R.tolist()
            return counts

    def take(self, is_open_R: npt.NDArray[np.bool_]) -> int | None:
        """Add a part to the replica with the fewest, and return its number.

        Of replicas with equally many, the first one is taken.

        Args:
            is_open_R: Whether each replica may be taken.

        Returns:
            The replica; None if none may be taken.
        """
        with self._lock:
            most = int(self._counts_R.max(initial=0)) + 1
            replica = int(np.where(is_open_R, self._counts_R, most).argmin())
            if not is_open_R[replica]:
                return None
            self._counts_R[replica] += 1
            return replica

    def give(self, replica: int) -> None:
        """Take a part off a replica again, as it has ended."""
        with self._lock:
            self._counts_R[replica] -= 1
