"""Counters of a lane."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["LaneMetrics"]


class LaneMetrics:
    """Counters of one environment, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_rows = self._num_failed = self._num_calls = self._num_losses = 0
        self._wait_s = self._max_wait_s = self._call_s = self._max_call_s = 0.0

    def add_call(self, call_s: float, waits_s: Sequence[float]) -> None:
        """Record a call.

        Args:
            call_s: Duration of the call, in seconds.
            waits_s: Time that each of its rows spent in the queue, in seconds.
        """
        with self._lock:
            self._num_calls += 1
            self._call_s += call_s
            self._max_call_s = max(self._max_call_s, call_s)
            self._wait_s += sum(waits_s)
            self._max_wait_s = max(self._max_wait_s, *waits_s, 0.0)

    def add_rows(self, num_rows: int, *, failed: bool) -> None:
        """Record rows that were scored or failed."""
        with self._lock:
            self._num_rows += num_rows
            self._num_failed += num_rows if failed else 0

    def add_losses(self, number: int) -> None:
        """Record workers that died or hung."""
        with self._lock:
            self._num_losses += number

    def to_dict(self) -> dict[str, float]:
        """Return the counts so far, times in seconds."""
        with self._lock:
            # All counts under one lock: means stay consistent while threads add.
            calls, rows = max(1, self._num_calls), max(1, self._num_rows)
            return {
                "rows": float(self._num_rows),
                "failed_rows": float(self._num_failed),
                "calls": float(self._num_calls),
                "rows_per_call": self._num_rows / calls,
                "lost_workers": float(self._num_losses),
                "wait_s_mean": self._wait_s / rows,
                "wait_s_max": self._max_wait_s,
                "call_s_mean": self._call_s / calls,
                "call_s_max": self._max_call_s,
            }
