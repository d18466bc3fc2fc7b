"""When a process began, by a clock that nobody sets."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["started_s"]

# Place of the start among the fields behind the name, of `man 5 proc_pid_stat`.
_START = 19


def started_s(pid: int) -> float:
    """Return when a process of this machine began, in seconds since its start.

    Tells a process from a later one of the same number. A time of day would not do:
    it changes for all processes where the clock of the machine is set.

    Raises:
        ProcessLookupError: There is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    # The name may hold spaces and brackets itself.
    fields = stat.rpartition(b")")[2].split()
    return int(fields[_START]) / os.sysconf("SC_CLK_TCK")
