"""What the cross-package tests share: the `rl` command as a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import kill_session
from small_run import long_grpo, write_recipe

COMMAND_DEADLINE_S = 280.0


def pytest_configure() -> None:
    """Have hangups reach runs also where the tests run under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@contextmanager
def starter(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rl ...` in sessions of their own, of which nothing is left in the end."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        default: dict[str, Any] = {
            "cwd": folder,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            # A shell starts what runs in the background with SIGINT ignored.
            "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        }
        process: subprocess.Popen[str] = subprocess.Popen(
            command(*arguments),
            text=True,
            start_new_session=True,
            **{**default, **options},
        )
        started.append(process)
        return process

    try:
        yield run
    finally:
        for process in started:
            kill_session(process)
            process.communicate()


def to_end(process: subprocess.Popen[str], deadline_s: float) -> Finished:
    """Wait for the end of a command."""
    out, err = process.communicate(timeout=deadline_s)
    return Finished(process.returncode, out, err)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rl ...` in a session of its own, in a folder of its own."""
    with starter(tmp_path) as run:
        yield run


@pytest.fixture
def rl(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Finished]:
    """Run `rl ...` to its end."""

    def run(*arguments: str, deadline_s: float = COMMAND_DEADLINE_S) -> Finished:
        return to_end(start(*arguments), deadline_s)

    return run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An undisturbed run of `long_grpo`, made once: `json` says what it ended with."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_recipe(folder, long_grpo())
    with starter(folder) as run:
        process = run("train", path, "--json", f"output_dir={folder}/out")
        done = to_end(process, COMMAND_DEADLINE_S)
    assert done.code == 0, done.err
    return done
