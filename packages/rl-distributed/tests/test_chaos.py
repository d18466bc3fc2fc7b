"""A short chaos run; `nox -s chaos` runs a long one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

RUNNER = Path(__file__).parent / "rl_distributed_chaos.py"
SECONDS = float(os.environ.get("RL_CHAOS_SECONDS", "20"))
SEED = os.environ.get("RL_CHAOS_SEED", "7")
# Rounds in progress are completed; restarts may take a while on a busy machine.
EXTRA_S = 280


def of_session(session):
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and os.getsid(process.pid) == session:
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + EXTRA_S + 60)
def test_every_call_ends_rightly_while_workers_are_tormented():
    process = subprocess.Popen(
        [sys.executable, RUNNER, "--minutes", str(SECONDS / 60), "--seed", SEED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS + EXTRA_S)
        assert process.returncode == 0, f"{out}\n{err}"
        assert out.startswith(f"seed {SEED}\n")
        summary = json.loads(out.splitlines()[-1])
        assert summary["results"] > 0
        assert summary["kill"] > 0
    finally:
        for left in of_session(process.pid):
            with suppress(psutil.Error):
                left.send_signal(signal.SIGKILL)
        process.communicate()
