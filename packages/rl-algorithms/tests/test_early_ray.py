from __future__ import annotations

import subprocess
import sys

import pytest

from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.setup.early_ray import adopt_early_ray, loaded_beside_ray
from rl_distributed.cluster.config import ClusterConfig

PROGRAM = """
import signal, sys, threading, time
from rl_algorithms.trainers.setup.early_ray import adopt_early_ray, loaded_beside_ray
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_distributed.cluster.config import ClusterConfig

def load():
    # Ray and this wait for each other: neither comes first.
    import ray
    end = time.monotonic() + 120
    while not ray.is_initialized() and time.monotonic() < end:
        time.sleep(0.01)
    loaded.append(threading.current_thread() is threading.main_thread())
    if fails:
        raise KeyError("no such library")
    return ray

loaded, config = [], ClusterConfig()
for fails, adopts in ((False, True), (True, False)):
    ours = signal.getsignal(signal.SIGTERM)
    with SignalGuard() as guard:
        guard.hold()
        try:
            with loaded_beside_ray(load, config, guard) as ray:
                up, adopted = ray.is_initialized(), [adopts and adopt_early_ray()]
                adopted.append(adopts and adopt_early_ray())
                handler = signal.getsignal(signal.SIGTERM) == guard._handle
                print("in", up, adopted, handler)
        except KeyError as error:
            print("failed", error)
    print("after", ray.is_initialized(), signal.getsignal(signal.SIGTERM) == ours)
    ray.shutdown()
print(loaded, "torch" in sys.modules)
"""


def test_ray_starts_while_libraries_are_imported_and_ends_with_the_block() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        # Adopted once, it is its new owner's to close.
        "in True [True, False] True",
        "after True True",
        "failed 'no such library'",
        "after False True",
        "[False, False] False",
    ], done.stderr


def test_nothing_is_started_early_where_torch_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(
        "rl_distributed.cluster.start.init_ray",
        lambda **_: pytest.fail("Ray was started"),
    )
    with (
        SignalGuard() as guard,
        loaded_beside_ray(lambda: "loaded", ClusterConfig(), guard) as loaded,
    ):
        assert loaded == "loaded"
        assert not adopt_early_ray()
