"""Descriptions of what a run is waiting for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from rl_algorithms.asynchronous import events as ev
from rl_algorithms.asynchronous.workers import Worker

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
one_worker = _module.one_worker

GENERATOR = Worker("generator", 0)


def test_waits_are_told_in_words():
    driver = one_worker(max_staleness=0)
    told = driver.schedule.waits()
    assert told == "step 0 has 0 of 1 finished groups; prompt 0 has 1 sampling"
    driver.tell(ev.WorkerFailed(9.0, GENERATOR, 0, "gone"))
    assert driver.schedule.waits().endswith("generator 0 is starting")
