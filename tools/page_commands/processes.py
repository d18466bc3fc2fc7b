"""Commands as a shell starts them: with a log, a deadline, and full cleanup."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["CommandError", "ShellCommand", "kill_all"]

MARK = "PAGE_COMMAND"
END_S = 120.0
"""Seconds between Ctrl-C and exit."""
GRACE_S = 20.0
"""Seconds within which its child processes exit after it."""
POLL_S = 0.1


_running: set[ShellCommand] = set()


def kill_all() -> None:
    """Kill the remaining processes of all commands."""
    for command in list(_running):
        command.kill()


class CommandError(Exception):
    """A command did not do what its page says."""


class ShellCommand:
    """A command line in a session of its own.

    Args:
        line: The command line.
        folder: Working directory.
        environment: All variables.
        log: File of its output.
    """

    def __init__(
        self, line: str, folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        # Identifies those of Ray's processes that leave the session.
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with log.open("a") as output:
            output.write(f"$ {line}\n")
            output.flush()
            self._begin = output.tell()
            self.process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=folder,
                env={**environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _running.add(self)

    @property
    def text(self) -> str:
        """Its output so far."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")

    def wait_for(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """Wait for a text in its output.

        Raises:
            CommandError: It did not appear in time, or the command has exited.
        """
        self.wait_until(
            lambda: re.search(pattern, self.text) is not None, pattern, deadline_s
        )
        found = re.search(pattern, self.text)
        assert found is not None
        return found

    def wait_until(
        self, is_so: Callable[[], bool], what: str, deadline_s: float
    ) -> None:
        """Wait for a condition while the command runs.

        Raises:
            CommandError: It did not hold in time, or the command has exited.
        """
        until_s = time.monotonic() + deadline_s
        while not is_so():
            if (code := self.process.poll()) is not None and not is_so():
                raise CommandError(f"ended with {code} before {what!r}")
            if time.monotonic() > until_s:
                self.kill()
                raise CommandError(f"no {what!r} in {deadline_s:g} s")
            time.sleep(POLL_S)

    def press_ctrl_c(self) -> None:
        """Interrupt it as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def end(self, deadline_s: float, exit_code: int) -> None:
        """Wait for its exit.

        Raises:
            CommandError: It does not exit in time or with the right code, shows a
                traceback or leaves a process.
        """
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CommandError(f"not done in {deadline_s:g} s") from None
        left = self._wait_for_the_rest()
        self.kill()
        if code != exit_code:
            raise CommandError(f"exit code {code}, not {exit_code}")
        if "Traceback (most recent call last)" in self.text:
            raise CommandError("shows a traceback")
        if left:
            raise CommandError(f"leaves {', '.join(left)}")

    def kill(self) -> None:
        """Kill it and all its child processes."""
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.poll()
        _running.discard(self)

    def _wait_for_the_rest(self) -> list[str]:
        """Return the names of processes that do not exit by themselves."""
        until_s = time.monotonic() + GRACE_S
        while (found := self._processes()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        names = []
        for process in found:
            with suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:80])
        return names

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                is_ours = (
                    os.getsid(process.pid) == self.process.pid
                    or process.environ().get(MARK) == self._mark
                )
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
