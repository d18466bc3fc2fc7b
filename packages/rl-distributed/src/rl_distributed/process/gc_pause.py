"""Keeping the garbage collector away from long-lived objects.

Python collects garbage after a number of new objects, and traverses all objects each
time their number has grown by a quarter. During the import of large libraries that
finds nothing, and takes a fifth of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_frozen", "gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector, and exempt objects made meanwhile from it.

    Objects are still freed when nothing refers to them. Only objects that refer to each
    other, and that became garbage before the end, are kept as long as the process. So
    it is meant for the start of a process, such as imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Otherwise the first collection would traverse all of these objects after all.
        gc.freeze()
        # The program may have disabled the collector itself.
        if was_enabled:
            gc.enable()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exempt the objects that exist now from garbage collection, until the end.

    In a program with large libraries, a collection that traverses all of their objects
    stops all threads for a third of a second. New objects are collected as usual. For a
    phase that is long, and that begins with everything built. At the end all objects
    count again, also those of `gc_paused`.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
