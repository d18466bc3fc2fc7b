"""Finding and killing the processes that a command has started."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import psutil


def session_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return all processes of the session in which a command was started."""
    found = []
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid:
                found.append(other)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a command at once, then its child processes."""
    if process.poll() is None:
        process.kill()
    for other in session_processes(process):
        # Some exit because others do.
        with suppress(psutil.Error):
            other.send_signal(signal.SIGKILL)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process is running; an unreaped zombie is not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
