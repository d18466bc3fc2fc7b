"""Which threads make a process count as busy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_distributed.process import activity
from rl_distributed.process.activity import has_busy_thread


@pytest.mark.parametrize(
    ("name", "state", "found"),
    [
        ("python", "R", "R"),
        ("ray::a) R (b", "S", "S"),
        ("gloo_tcp_loop", "R", ""),
    ],
)
def test_threads_that_only_look_out_for_others_do_not_count(
    tmp_path, name, state, found
):
    (tmp_path / "stat").write_text(f"41 ({name}) {state} 1 1\n")
    assert activity._state(tmp_path) == found
    assert activity._state(tmp_path / "gone") == ""


def test_who_computes_is_at_work_until_he_is_gone():
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        try:
            busy.stdout.readline()
            assert has_busy_thread(busy.pid)
        finally:
            busy.kill()
    assert not has_busy_thread(busy.pid)


def test_who_asks_does_not_count():
    code = (
        "import os; from rl_distributed.process.activity import has_busy_thread;"
        "print(has_busy_thread(os.getpid()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "False"
