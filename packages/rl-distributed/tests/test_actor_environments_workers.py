from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
import rl_distributed_sample_environments as sample
import torch

from rl_distributed import (
    BatchedDataDict,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartWorker,
    WorkerDiedError,
)
from rl_distributed.actor_environments import (
    EnvironmentStore,
    InstalledEnvironment,
    InterpreterEnvironment,
    environment_registry,
    on_nodes,
)
from rl_distributed.errors import ActorEnvironmentError, WorkerStartError

MODULE = "rl_distributed_sample_environments"
SCALER = f"{MODULE}.Scaler"
START_S = 240


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        sample.write_wheel(folder, version)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("environments")


@pytest.fixture(autouse=True)
def own_root(root, monkeypatch):
    monkeypatch.setenv("RL_ENV_ROOT", str(root))


@pytest.fixture
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


def start(cluster, builder, **options):
    return RayWorkerGroup(
        cluster, builder, workers_per_node=1, start_deadline_s=START_S, **options
    )


def call(group, method, **kwargs):
    return ray.get(
        group.run_single_worker_single_data(method, 0, **kwargs), timeout=START_S
    )


@pytest.mark.slow
def test_two_versions_of_one_library_in_one_job(cluster, wheels, root):
    if not any(sample.WHEELHOUSE.glob("ray-*.whl")):
        pytest.fail("wheelhouse/ is empty; run: python tools/wheelhouse.py fill")
    apart = InstalledEnvironment(
        (f"{sample.LIBRARY}==2.0",),
        find_links=(wheels, sample.WHEELHOUSE),
        no_index=True,
        preflight_deadline_s=120,
    )
    over = sample.overlay(wheels, "1.0", preflight_deadline_s=120)
    builder = RayWorkerBuilder(SCALER, name="old").with_options(environment=over)
    other = RayWorkerBuilder(SCALER, name="new").with_options(environment=apart)
    with start(cluster, builder) as old, start(cluster, other) as new:
        assert (call(old, "version"), call(new, "version")) == ("1.0", "2.0")
        batch = BatchedDataDict(
            {"values": torch.arange(4.0).bfloat16(), "seen": [[], [], [], []]}
        )
        # Twice around, from worker to worker: the driver only passes references.
        passed = batch
        for group in (old, new, old, new):
            passed = group.run_single_worker_single_data("apply", 0, batch=passed)
        result = ray.get(passed, timeout=START_S)
        assert isinstance(result, BatchedDataDict)
        assert torch.equal(result["values"], torch.arange(4.0).bfloat16() * 4)
        assert result["seen"] == [["old 1.0", "new 2.0"] * 2] * 4
        prefix, *files = call(new, "packages")
        assert prefix == str(root / apart.key())
        assert all(file.startswith(prefix) for file in files)
        _, *files = call(old, "packages")
        assert all(file.startswith(sys.prefix) for file in files)
        # The processes themselves keep their environments from being removed.
        assert EnvironmentStore(root).prune(0, start_grace_s=0) == []
    assert sample.LIBRARY not in sys.modules


def test_class_that_declares_its_environment(cluster, wheels):
    environment = sample.overlay(wheels, "2.0", preflight_deadline_s=120)

    class Declared:
        actor_environment = environment

        def version(self):
            import isolation_sample  # noqa: PLC0415

            return isolation_sample.VERSION

    with start(cluster, RayWorkerBuilder(Declared)) as group:
        assert call(group, "version") == "2.0"


def test_restarted_worker_is_in_the_same_environment(cluster, wheels):
    # Workers find the module of the base class only through the search path.
    class Mortal(sample.Scaler):
        actor_environment = sample.overlay(wheels, "1.0", preflight_deadline_s=120)

        def die(self):
            os.kill(os.getpid(), signal.SIGKILL)

    builder = RayWorkerBuilder(Mortal)
    with start(cluster, builder, failure_policy=RestartWorker()) as group:
        before = call(group, "packages")
        with pytest.raises(WorkerDiedError):
            group.get_all_worker_results(
                group.run_all_workers_single_data("die"), deadline_s=START_S
            )
        after = group.get_all_worker_results(
            group.run_all_workers_single_data("packages"), deadline_s=START_S
        )
        assert after == [before]


def test_class_by_path_tells_its_environment_itself(cluster, wheels, tmp_path):
    # The driver never imports this module; a worker does, and asks to be moved.
    name = f"declares_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(
        "from rl_distributed_sample_environments import Scaler, overlay\n\n\n"
        "class Declared(Scaler):\n"
        f"    actor_environment = overlay({str(wheels)!r}, '2.0')\n"
    )
    sys.path.append(str(tmp_path))
    try:
        with start(cluster, RayWorkerBuilder(f"{name}.Declared")) as group:
            assert call(group, "version") == "2.0"
    finally:
        sys.path.remove(str(tmp_path))
    assert name not in sys.modules


def test_environment_registered_for_a_module(cluster, wheels, monkeypatch):
    monkeypatch.setitem(
        environment_registry._registered, MODULE, sample.overlay(wheels)
    )
    monkeypatch.setenv("DRIVER_ONLY", "secret")
    with start(cluster, RayWorkerBuilder(SCALER)) as group:
        assert call(group, "version") == "1.0"
        assert not any(call(group, "leak"))


def test_without_a_declaration_the_missing_package_is_explained(cluster):
    with pytest.raises(WorkerStartError, match=r"'isolation_sample'"):
        start(cluster, RayWorkerBuilder(SCALER))


def test_errors_come_before_any_process_and_soon(cluster, wheels, tmp_path):
    builder = RayWorkerBuilder(SCALER)
    bare = tmp_path / "bare"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=60
    )
    wrong = [
        (InterpreterEnvironment("/no/such/python"), "no program on this machine"),
        (InterpreterEnvironment(bare / "bin" / "python"), "cannot import 'ray'"),
        (sample.overlay(wheels, "7.0"), r"cannot be built.*"),
        (sample.overlay(wheels, imports=("nothing_here",)), "nothing_here"),
    ]
    before = set(_hosts())
    for environment, match in wrong:
        with pytest.raises(ActorEnvironmentError, match=match):
            start(cluster, builder.with_options(environment=environment))
    with pytest.raises(ActorEnvironmentError, match="no program on this machine"):
        start(cluster, builder.with_options(py_executable="/no/such/python"))
    assert set(_hosts()) <= before


def test_other_nodes_are_asked_once(ray_cluster, monkeypatch, wheels, root):
    """The task for other nodes runs on the only node."""
    own = ray.get_runtime_context().get_node_id()
    environment = sample.overlay(wheels, "2.0", preflight_deadline_s=120)

    class Elsewhere:
        def get_node_id(self):
            return "the driver is on another node"

    monkeypatch.setattr(on_nodes.ray, "get_runtime_context", Elsewhere)
    first = on_nodes.prepare_on_nodes(environment, [own])
    assert first[own].key == environment.key()
    monkeypatch.setattr(on_nodes, "_task", None)  # no node is queried again
    assert on_nodes.prepare_on_nodes(environment, [own]) == first


def test_error_of_another_node_names_it(ray_cluster, monkeypatch):
    own = ray.get_runtime_context().get_node_id()

    class Elsewhere:
        def get_node_id(self):
            return "the driver is on another node"

    monkeypatch.setattr(on_nodes.ray, "get_runtime_context", Elsewhere)
    with pytest.raises(ActorEnvironmentError, match=f"on node {own}: .*no program"):
        on_nodes.prepare_on_nodes(InterpreterEnvironment("/no/such/python"), [own])


def _hosts() -> list[int]:
    """Return the worker processes among those that Ray runs for this test."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("WorkerHost" in word for word in process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_each_node_builds_in_its_own_folder(wheels, tmp_path):
    script = Path(sample.__file__).parent / "rl_distributed_sample_env_nodes.py"
    process = subprocess.Popen(
        [sys.executable, script, wheels, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=START_S)
    finally:
        if process.poll() is None:
            # Ray's own processes outlive a killed script.
            tree = psutil.Process(process.pid).children(recursive=True)
            for each in (process, *tree):
                each.kill()
    assert process.returncode == 0, err
    told = json.loads(out.strip().splitlines()[-1])
    assert told["built"] == {"first": 1, "second": 1}
    assert [Path(p).is_relative_to(tmp_path) for p in told["prefixes"]] == [True] * 2
    assert len(set(told["prefixes"])) == 2
