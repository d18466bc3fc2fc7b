"""An 80-column terminal in which commands run as for a person."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

COLUMNS = 80
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]")
_BOX = "│┃┏┡└"


class Command:
    """A command in a pseudo-terminal, and its output.

    Args:
        arguments: The command.
        cwd: Where it runs.
        env: Its environment.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> None:
        self.title = " ".join(Path(part).name for part in arguments[:3])
        self.began_s = time.monotonic()
        self._screen, inner = pty.openpty()
        size = struct.pack("HHHH", 40, COLUMNS, 0, 0)
        fcntl.ioctl(inner, termios.TIOCSWINSZ, size)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *arguments],
            cwd=cwd, env=dict(env), stdin=inner, stdout=inner, stderr=inner,
            start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self._raw = b""
        self.took_s = 0.0

    @property
    def text(self) -> str:
        """All output, without colours and cursor movements."""
        plain = _CONTROL.sub("", self._raw.decode(errors="replace"))
        return plain.replace("\r\n", "\n")

    @property
    def words(self) -> str:
        """The text with single blanks between words: lines wrap anywhere."""
        return " ".join(self.text.split())

    def wait_for(self, pattern: str, limit_s: float) -> float:
        """Wait until words appear; return the seconds since the start.

        Raises:
            AssertionError: They do not appear in time.
        """
        deadline = time.monotonic() + limit_s
        while re.search(pattern, self.words) is None:
            is_open = self._read(deadline)
            if not is_open or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"{self.title}: no {pattern!r} in {limit_s:g} s:\n{self.text}"
                )
        return time.monotonic() - self.began_s

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C."""
        os.write(self._screen, b"\x03")

    def end(self, limit_s: float, code: int = 0) -> Command:
        """Wait for the exit with a given code; return the command.

        Raises:
            AssertionError: It does not exit, exits with another code, writes a
                traceback or a table that is too wide, or leaves a process.
        """
        deadline = time.monotonic() + limit_s
        while self._read(deadline):
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"{self.title}: not done in {limit_s:g} s:\n{self.text}"
                )
        found = self._process.wait(60)
        self.took_s = time.monotonic() - self.began_s
        os.close(self._screen)
        # The shell convention for termination by a signal.
        found = 128 - found if found < 0 else found
        assert found == code, f"{self.title}: exit code {found}:\n{self.text}"
        assert "Traceback" not in self.text, self.text
        assert "unexpected" not in self.text, self.text
        rows = [line for line in self.text.splitlines() if line[:1] in tuple(_BOX)]
        wide = [row for row in rows if len(row.rstrip()) > COLUMNS]
        assert not wide, f"{self.title}: wider than {COLUMNS} columns:\n{wide}"
        return self

    def kill(self) -> None:
        """Kill the command and its child processes."""
        for process in _session(self._process.pid):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def _read(self, deadline: float) -> bool:
        """Read available output, or wait a second; False: the terminal is closed."""
        left_s = min(1.0, max(0.0, deadline - time.monotonic()))
        if not select.select([self._screen], [], [], left_s)[0]:
            return self._process.poll() is None
        try:
            read = os.read(self._screen, 65_536)
        except OSError:
            return False
        self._raw += read
        return bool(read)


# The terminal becomes the new session's controlling one: Ctrl-C is its signal.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def _session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return running processes whose environment has a variable with this value."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.environ().get(name) == value
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
