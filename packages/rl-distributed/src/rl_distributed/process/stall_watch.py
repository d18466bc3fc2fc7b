"""`StallWatch`: notices that a program makes no progress.

```
part     consumes         produces   waits for        is unblocked by
thread   time             on_stall   the limit        close
note     -                -          nothing          -
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["StallWatch"]

_LOOK_S = 1.0
_CLOSE_S = 5.0


class StallWatch:
    """Calls back, once, when no progress was noted for some time.

    Args:
        limit_s: Seconds without progress that count as a stall; None for no watch.
        on_stall: Called in the watch's thread.
    """

    def __init__(self, limit_s: float | None, on_stall: Callable[[], None]) -> None:
        self.limit_s = limit_s
        self._on_stall = on_stall
        self._notes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if limit_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(limit_s,), name="stall-watch", daemon=True
            )
            self._thread.start()

    def note(self) -> None:
        """Note progress; may be called from any thread, and costs nothing."""
        self._notes += 1

    def close(self) -> None:
        """End the watch; may be called more than once."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    @property
    def is_closed(self) -> bool:
        """Whether the watch has ended."""
        return self._stop.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the watch is closed; return False if it is not by then."""
        return self._stop.wait(timeout_s)

    def _run(self, limit_s: float) -> None:
        look_s = min(_LOOK_S, limit_s / 4)
        notes, silent_s, looked_at = self._notes, 0.0, time.monotonic()
        while not self._stop.wait(look_s):
            now = time.monotonic()
            # A longer gap means that this process was stopped: it is no time in which
            # anything could have made progress.
            silent_s += min(now - looked_at, 2 * look_s)
            looked_at = now
            if notes != self._notes:
                notes, silent_s = self._notes, 0.0
            elif silent_s >= limit_s:
                self._on_stall()
                return
