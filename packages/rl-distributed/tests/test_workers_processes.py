"""Process information from the operating system, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from rl_distributed.workers import processes
from rl_distributed.workers.processes import is_at_work, is_stopped


@contextmanager
def process(code):
    started = subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        started.stdout.readline()
        yield SimpleNamespace(process=psutil.Process(started.pid))
    finally:
        started.kill()
        started.communicate()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end


@pytest.mark.parametrize(
    ("code", "at_work"), [("while True: pass", True), ("input()", False)]
)
def test_who_computes_is_told_from_who_waits(code, at_work, monkeypatch):
    monkeypatch.setattr(processes, "_LOOK_S", 0.005)
    with process(code) as worker:
        # A newly started process has work until it waits.
        wait_for(lambda: is_at_work(worker) is at_work)
        assert not is_stopped(worker)
        os.kill(worker.process.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(worker))
        assert not is_at_work(worker)
        worker.process.kill()
        worker.process.wait(60)
        assert not is_at_work(worker)
        assert not is_stopped(worker)


def test_nothing_is_known_of_other_machines():
    assert not is_at_work(SimpleNamespace(process=None))
    assert not is_stopped(SimpleNamespace(process=None))
