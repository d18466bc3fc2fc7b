"""Finding the processes that a command has started."""

from __future__ import annotations

import os
import subprocess

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
