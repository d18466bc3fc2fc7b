from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
        # Once adopted, it is closed by its new owner.
        "in True [True, False] True",
        "after True True",
        "failed 'no such library'",
        "after False True",
        "[False, False] False",
    ], done.stderr


WRONG_DATA = """
import sys
import rl_algorithms as rl
from rl_distributed.cluster.session_owner import _held
from rl_distributed.cluster.start import init_ray

model, address = sys.argv[1:]
if address == "own":
    init_ray(num_cpus=1)

def rows():
    import ray
    print("rows", ray.is_initialized(), len(_held))
    return iter(())

try:
    rl.train(model, rows, lambda response: 1.0, max_num_steps=1, progress=False)
except rl.DataError as error:
    import ray
    print(type(error).__name__, ray.is_initialized(), len(_held))
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_wrong_data_ends_the_cluster_that_was_started_early_and_no_other(
    is_own: bool, tiny_model: str, tmp_path: Path
) -> None:
    kind = "own" if is_own else "early"
    done = subprocess.run(
        [sys.executable, "-c", WRONG_DATA, tiny_model, kind],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    # Exiting also releases the session, which is cleaned up later.
    left = "EmptyDatasetError True 1" if is_own else "EmptyDatasetError False 0"
    assert done.stdout.splitlines() == ["rows True 1", left], done.stderr


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
