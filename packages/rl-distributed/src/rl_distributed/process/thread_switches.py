"""How often the threads of a program take turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frequent_thread_switches"]

_FREQUENT_S = 5e-4
_lock = threading.Lock()
# Uses now, and the interval before the first: the setting is one for the whole process,
# and uses of several threads may end in any order.
_num_uses = 0
_before_s = 0.0


@contextmanager
def frequent_thread_switches() -> Iterator[None]:
    """Have the threads of this process take turns every 0.5 ms, until the end.

    A thread that waits for the interpreter gets it after this interval, by default of
    Python 5 ms. Where work passes through several threads while another one computes,
    each hand-over waits that long. A shorter interval of the program itself is kept.
    Uses may overlap: the interval from before is back after the last.
    """
    global _num_uses, _before_s
    with _lock:
        if not _num_uses:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, _FREQUENT_S))
        _num_uses += 1
    try:
        yield
    finally:
        with _lock:
            _num_uses -= 1
            if not _num_uses:
                sys.setswitchinterval(_before_s)
