"""Runs scripts of `scripts/` that start their own Ray cluster, and stops all of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
# Variables of the surrounding session must not reach the clusters of the scripts.
_OURS = ("RAY_", "RL_")
_DEADLINE_S = 240.0


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """A folder for Ray's sessions; short, because socket paths include it."""
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    # Byte code of Ray and torch is cached, or each process would compile it again.
    return {**kept, "PYTHONDONTWRITEBYTECODE": "", **changes}


def run_script(
    name: str, *arguments: str, deadline_s: float = _DEADLINE_S, **variables: str
) -> dict:
    """Run a script; return the JSON object on its last output line."""
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    with ray_folder() as folder:
        environment = clean_environment(**{"RAY_TMPDIR": folder, **variables})
        code, out, err = run_to_end(command, environment, deadline_s)
    assert code == 0, f"{name} failed\n{out}\n{err}"
    return json.loads(out.strip().splitlines()[-1])


def run_to_end(
    command: list[str], environment: dict[str, str], deadline_s: float
) -> tuple[int, str, str]:
    """Run a command in its own session, and leave nothing of it behind."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        end_session(process)
        out, err = process.communicate(timeout=30)
        raise AssertionError(
            f"{command} did not end in {deadline_s} s\n{out}\n{err}"
        ) from None
    finally:
        end_session(process)
    return process.returncode, out, err


def end_session(process: subprocess.Popen) -> None:
    """Kill every process of the session that `process` leads."""
    left = []
    for other in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(other.pid) == process.pid:
                left.append(other)
    for other in left:
        with contextlib.suppress(psutil.Error):
            other.send_signal(signal.SIGKILL)
    psutil.wait_procs(left, timeout=10)
