"""Run two trainers in turn, step by step, under the same machine load.

```
main thread (ours)         thread (peer)
   step ...                 waits
   waits                    step ...
   step ...                 waits
```
A `Baton` is held by exactly one side. Each side takes it when its step begins and
passes it when the step ends; the times between are what is compared.
"""

from __future__ import annotations

import statistics
import threading
import time

DEADLINE_S = 600.0


class Baton:
    """Makes two threads take turns step by step, and times each side's steps.

    Args:
        sides: Names of the two sides; the first begins.
    """

    def __init__(self, sides: tuple[str, str]) -> None:
        self.times_s: dict[str, list[float]] = {side: [] for side in sides}
        self._condition = threading.Condition()
        self._turn = sides[0]
        self._done: set[str] = set()
        self._began_s = 0.0

    def take(self, side: str) -> None:
        """Wait until it is this side's turn; its step begins now.

        Raises:
            TimeoutError: When the other side does not pass the baton in time.
        """
        with self._condition:
            free = self._condition.wait_for(
                lambda: self._turn == side or self._other(side) in self._done,
                timeout=DEADLINE_S,
            )
            if not free:
                raise TimeoutError(f"{self._other(side)} did not finish its step")
            self._turn = side
        self._began_s = time.perf_counter()

    def give(self, side: str) -> None:
        """End this side's step; the other side's begins."""
        self.times_s[side].append(time.perf_counter() - self._began_s)
        with self._condition:
            self._turn = self._other(side)
            self._condition.notify_all()

    def leave(self, side: str) -> None:
        """Leave the alternation; this side takes no more turns."""
        with self._condition:
            self._done.add(side)
            self._condition.notify_all()

    def _other(self, side: str) -> str:
        return next(name for name in self.times_s if name != side)


def summary(times_s: list[float], warmup: int) -> dict[str, float]:
    """Return median, quartiles and count of the steps after the warm-up."""
    kept = sorted(times_s[warmup:])
    quartiles = statistics.quantiles(kept, n=4)
    return {
        "median_s": round(statistics.median(kept), 4),
        "q1_s": round(quartiles[0], 4),
        "q3_s": round(quartiles[2], 4),
        "steps": len(kept),
    }
