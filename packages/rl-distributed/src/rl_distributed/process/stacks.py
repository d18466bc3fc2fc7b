"""The stacks of a process's Python threads, as text for a report."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Collection

__all__ = ["thread_stacks"]

# Deep recursion must not fill a report; the innermost frames say what a thread does.
_NUM_FRAMES = 30


def thread_stacks(leave_out: Collection[int] = ()) -> str:
    """Return the stack of each thread, the main thread first, innermost frame last.

    Args:
        leave_out: Identifiers of threads that are not shown.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = []
    for ident, frame in frames:
        if ident in leave_out:
            continue
        stack = traceback.extract_stack(frame)
        left_out = len(stack) - _NUM_FRAMES
        lines = [f"thread {names.get(ident, ident)}:\n"]
        if left_out > 0:
            lines.append(f"  ({left_out} outer frames left out)\n")
        parts.append(
            "".join([*lines, *traceback.format_list(stack[-_NUM_FRAMES:])]).rstrip()
        )
    return "\n".join(parts)
