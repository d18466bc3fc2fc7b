"""Whether a process on this machine is at work, as the system sees it."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["has_busy_thread"]

# Threads that poll all the time, as those of gloo's connections do.
_LOOKOUTS = ("gloo_",)


def has_busy_thread(pid: int) -> bool:
    """Whether a thread is running, runnable or in disk wait at this moment.

    The calling thread does not count, nor do threads that poll for other ranks. False
    for a process that is gone.

    Args:
        pid: Process id.
    """
    own = threading.get_native_id()
    return any(
        int(task.name) != own and _state(task) in ("R", "D")
        for task in Path(f"/proc/{pid}/task").glob("[0-9]*")
    )


def _state(task: Path) -> str:
    """Return the letter of its state.

    Empty for a thread that is gone or does not count.
    """
    status = ""
    # A thread may end between being listed and being read.
    with suppress(OSError):
        status = (task / "stat").read_text()
    # The name before the state may hold anything.
    start, _, rest = status.rpartition(")")
    name = start.partition("(")[2]
    return rest.split()[0] if rest and not name.startswith(_LOOKOUTS) else ""
