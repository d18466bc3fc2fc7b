"""Finding and ending the processes that a command has started."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import psutil


def session_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of the session that a command was started in."""
    found = []
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid:
                found.append(other)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a command at once, then what it has started."""
    if process.poll() is None:
        process.kill()
    for other in session_processes(process):
        # Some end because others do.
        with suppress(psutil.Error):
            other.send_signal(signal.SIGKILL)


def is_running(process: psutil.Process) -> bool:
    """Whether a process has not ended, be it that nobody has asked how."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
