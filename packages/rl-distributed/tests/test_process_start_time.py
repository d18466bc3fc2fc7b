from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from rl_distributed.process.start_time import started_s


def test_a_later_process_began_later_and_one_that_is_gone_never() -> None:
    # Seconds since the start of the machine, as the clock of the kernel counts them.
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert started_s(os.getpid()) <= now_s
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        assert started_s(os.getpid()) <= started_s(child.pid)
        assert started_s(child.pid) == pytest.approx(now_s, abs=60)
        child.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        started_s(child.pid)
