"""What the cross-package tests share: the `rl` command as a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import session_processes

COMMAND_DEADLINE_S = 280.0


@dataclass(frozen=True)
class Finished:
    """What a finished command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object on the last line of standard output."""
        return json.loads(self.out.strip().splitlines()[-1])


def command(*arguments: str) -> list[str]:
    """The command line of `rl` with these arguments."""
    return [sys.executable, "-m", "rl_cli", *arguments]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rl ...` in a session of its own, in a folder of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*arguments),
            cwd=options.pop("cwd", tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell starts what runs in the background with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        for other in session_processes(process):
            other.send_signal(signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def rl(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Finished]:
    """Run `rl ...` to its end."""

    def run(*arguments: str, deadline_s: float = COMMAND_DEADLINE_S) -> Finished:
        process = start(*arguments)
        out, err = process.communicate(timeout=deadline_s)
        return Finished(process.returncode, out, err)

    return run
