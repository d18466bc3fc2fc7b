"""How often the threads of a program take turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frequent_thread_switches"]


@contextmanager
def frequent_thread_switches(interval_s: float = 5e-4) -> Iterator[None]:
    """Have the threads of this process take turns more often, until the end.

    A thread that waits for the interpreter gets it after this time, by default of
    Python 5 ms. Where work passes through several threads while another one computes,
    each hand-over waits that long. A shorter interval of the program itself is kept.

    Args:
        interval_s: Seconds after which a thread gives way.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, interval_s))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
