"""The watch over processes of an engine, on processes that only wait."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from rl_models.generation.vllm import process_watch
from rl_models.generation.vllm.process_watch import ProcessWatch


@contextmanager
def waiting(count):
    """Waiting processes, and a watch over them with its reports."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]
    told = queue.Queue()
    watch = ProcessWatch([process.pid for process in started], told.put)
    try:
        yield started, told, watch
    finally:
        watch.close()
        for process in started:
            process.kill()
            process.communicate()


def test_an_end_is_told_at_once_and_again_to_who_asks():
    with waiting(2) as (started, told, watch):
        watch.check()
        assert told.empty()
        started[1].kill()
        assert told.get(timeout=60) == (
            f"process {started[1].pid} of vLLM's engine has ended"
        )
        watch.check()
        assert "has ended" in told.get(timeout=60)


def test_a_process_that_stands_still_is_killed(monkeypatch):
    monkeypatch.setattr(process_watch, "_LOOK_S", 0.02)
    monkeypatch.setattr(process_watch, "_STOPPED_S", 0.1)
    with waiting(1) as ((process,), told, _):
        process.send_signal(signal.SIGSTOP)
        assert "stood still (SIGSTOP)" in told.get(timeout=60)
        assert process.wait(60) == -signal.SIGKILL


def test_one_that_goes_on_soon_is_let_live(monkeypatch):
    monkeypatch.setattr(process_watch, "_LOOK_S", 0.02)
    looks = iter([True, True, False, True, False])
    seen = queue.Queue()

    def is_stopped(number):
        seen.put(number)
        return next(looks, False)

    monkeypatch.setattr(process_watch, "_is_stopped", is_stopped)
    monkeypatch.setattr(process_watch, "_STOPPED_S", 0.05)
    with waiting(1) as ((process,), told, _):
        for _ in range(7):
            assert seen.get(timeout=60) == process.pid
        assert told.empty()
        assert process.poll() is None


def test_what_is_gone_cannot_be_watched():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    with pytest.raises(ProcessLookupError):
        ProcessWatch([process.pid], print)


CHILD = """
from rl_models.generation.vllm.process_watch import end_with_parent
end_with_parent()
print("watched", flush=True)
import threading
threading.Event().wait()
"""
PARENT = f"""
import os, subprocess, sys
from rl_models.generation.vllm.process_watch import parent_variables
os.environ.update(parent_variables())
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def test_a_process_of_an_engine_ends_with_the_one_that_it_is_for():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as parent:
        assert int(parent.stdout.readline())
        parent.kill()
        # The pipe closes only once the child, which also holds it, is gone.
        assert parent.communicate(timeout=60)[1] == b""
