"""Fixtures of the cross-package tests: the `rl` command as a real process."""

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
    """Deliver SIGHUP to runs even if the tests run under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass(frozen=True)
class Finished:
    """The output of a finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Parse the JSON object on the last line of standard output."""
        return json.loads(self.out.strip().splitlines()[-1])


def command(*arguments: str) -> list[str]:
    """Return the command line of `rl` with these arguments."""
    return [sys.executable, "-m", "rl_cli", *arguments]


@contextmanager
def starter(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rl ...` in sessions of their own, and leave nothing of them behind."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        default: dict[str, Any] = {
            "cwd": folder,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            # A shell starts background processes with SIGINT ignored.
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
    """Wait until a command exits."""
    out, err = process.communicate(timeout=deadline_s)
    return Finished(process.returncode, out, err)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rl ...` in a session of its own, in a folder of its own."""
    with starter(tmp_path) as run:
        yield run


@pytest.fixture
def rl(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Finished]:
    """Run `rl ...` to completion."""

    def run(*arguments: str, deadline_s: float = COMMAND_DEADLINE_S) -> Finished:
        return to_end(start(*arguments), deadline_s)

    return run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An uninterrupted run of `long_grpo`, made once; `json` holds its result."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_recipe(folder, long_grpo())
    with starter(folder) as run:
        process = run("train", path, "--json", f"output_dir={folder}/out")
        done = to_end(process, COMMAND_DEADLINE_S)
    assert done.code == 0, done.err
    return done
