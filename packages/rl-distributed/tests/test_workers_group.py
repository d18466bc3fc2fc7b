from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
import ray

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    ActorEnvironmentError,
    ConfigError,
    DeadlineExceededError,
    ResourceInsufficientError,
    ShardingError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup

MODULE = "rl_distributed_sample_workers"
SAMPLE = f"{MODULE}.Sample"
SHARDED = NamedSharding([[0, 1]], ["replica", "data"])


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster(
        [2], max_colocated_worker_groups=4, name="shared"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(cluster):
    builder = RayWorkerBuilder(SAMPLE, 5, label="x").with_options(num_threads=2)
    with RayWorkerGroup(
        cluster, builder, name_prefix="sample", sharding_annotations=SHARDED
    ) as group:
        yield group


@pytest.fixture
def brittle(cluster):
    """A separate group for a test that breaks it."""
    with RayWorkerGroup(
        cluster, RayWorkerBuilder(SAMPLE), name_prefix="brittle"
    ) as group:
        yield group


def is_alive(pid):
    """Return whether a process runs; a zombie has exited, its parent is only slow."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def results(group, future, **more):
    return group.get_all_worker_results(future, **more)


def test_class_alone_makes_a_group(cluster):
    class Doubler:
        def double(self, value):
            return 2 * value

    for worker, method, expected in (
        (Doubler, "double", [6, 6]),
        (SAMPLE, "add", [3, 3]),
    ):
        with RayWorkerGroup(cluster, worker) as group:
            assert group.name == ("Doubler" if worker is Doubler else "Sample")
            references = group.run_all_workers_single_data(method, value=3)
            assert ray.get(references) == expected


def test_wrong_class_starts_nothing():
    class NeedsModel:
        def __init__(self, model_name):
            self.model_name = model_name

    cluster = RayVirtualCluster([1])  # would start Ray if asked for a placement
    with pytest.raises(
        ConfigError, match=r"worker_class must be .* an object of NeedsModel; give its"
    ):
        RayWorkerGroup(cluster, NeedsModel("tiny"))
    with pytest.raises(ConfigError, match=r"without @ray\.remote"):
        RayWorkerGroup(cluster, ray.remote(NeedsModel))
    with pytest.raises(ConfigError, match=r"worker_class must be .* give a class"):
        RayWorkerGroup(cluster, lambda: 1)
    with pytest.raises(ConfigError, match=r"got NeedsModel .*RayWorkerBuilder\(Needs"):
        RayWorkerGroup(cluster, NeedsModel)
    assert not cluster._placement_groups


def test_environment_of_workers(group):
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR"]
    names += ["MASTER_PORT", "OMP_NUM_THREADS"]
    first, second = results(
        group, group.run_all_workers_single_data("env", names=names)
    )
    port = first["MASTER_PORT"]
    assert 0 < int(port) < 65536
    common = {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "2"}
    assert first == {"RANK": "0", "LOCAL_RANK": "0", **common}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", **common}
    assert group.world_size == group.dp_size == 2
    assert group.get_dp_leader_worker_idx(1) == 1
    with pytest.raises(IndexError, match="2 tied groups"):
        group.get_dp_leader_worker_idx(2)


def test_methods_run_in_the_main_thread(group):
    ref = group.run_single_worker_single_data("thread_name", 0)
    assert results(group, [ref]) == ["MainThread"]


def test_single_worker(group):
    assert ray.get(group.run_single_worker_single_data("add", 1, value=2)) == 7
    with pytest.raises(IndexError, match="workers 0 to 1: got worker_idx 2"):
        group.run_single_worker_single_data("add", 2, value=2)


def test_all_workers_single_data(group):
    refs = group.run_all_workers_single_data("echo", value=np.arange(3))
    answers = results(group, refs)
    assert [rank for rank, _ in answers] == [0, 1]
    assert all(kwargs["value"].tolist() == [0, 1, 2] for _, kwargs in answers)
    only = group.run_all_workers_single_data("rank", run_rank_0_only_axes=["data"])
    assert results(group, only) == [0]


def test_all_workers_multiple_data(group):
    refs = group.run_all_workers_multiple_data(
        "add", value=[1, 2], common_kwargs={"offset": 100}
    )
    assert results(group, refs) == [106, 107]
    only = group.run_all_workers_multiple_data(
        "add", run_rank_0_only_axes=["data"], value=[3]
    )
    assert results(group, only) == [8]
    with pytest.raises(ShardingError, match="each of the 2 workers"):
        group.run_all_workers_multiple_data("add", value=[1])
    with pytest.raises(ShardingError, match="both in common_kwargs"):
        group.run_all_workers_multiple_data(
            "add", value=[1, 2], common_kwargs={"value": 1}
        )


# Every name that a group call reserves for itself.
TAKEN = {
    "method_name": "a",
    "worker_idx": 1,
    "common_kwargs": {"b": 2},
    "split_kwargs": {"c": 3},
    "call_deadline_s": 0.5,
    "run_rank_0_only_axes": ["d"],
    "in_sharded_axes": "e",
    "context": 4,
    "packed": 5,
    "args": 6,
    "kwargs": 7,
}


@pytest.mark.parametrize("value", ["plain", "reference"])
def test_arguments_may_have_names_that_calls_have_themselves(group, value):
    # A reference among them is passed differently.
    more = {"x": ray.put(1) if value == "reference" else 1}
    common, expected = {**TAKEN, **more}, {**TAKEN, "x": 1}
    one = group.run_single_worker_single_data("echo", 1, common_kwargs=common)
    assert results(group, [one]) == [(1, expected)]
    all_same = group.run_all_workers_single_data("echo", common_kwargs=common)
    assert results(group, all_same) == [(0, expected), (1, expected)]
    split = {name: [value, value] for name, value in TAKEN.items()}
    each = group.run_all_workers_multiple_data(
        "echo", split_kwargs=split, common_kwargs=more
    )
    assert results(group, each) == [(0, expected), (1, expected)]
    sharded = group.run_all_workers_sharded_data(
        "echo", split_kwargs=split, common_kwargs=more, in_sharded_axes=["data"]
    )
    assert results(group, sharded) == [(0, expected), (1, expected)]


def test_an_argument_is_given_once(group):
    with pytest.raises(ShardingError, match=r"\['x'\] .* both in common_kwargs and by"):
        group.run_single_worker_single_data("echo", 0, x=1, common_kwargs={"x": 2})
    with pytest.raises(ShardingError, match=r"\['x'\] .* both in split_kwargs and by"):
        group.run_all_workers_multiple_data(
            "echo", x=[1, 2], split_kwargs={"x": [1, 2]}
        )
    with pytest.raises(ShardingError, match=r"\['x'\] .* both in common_kwargs and by"):
        group.run_all_workers_multiple_data(
            "echo", split_kwargs={"x": [1, 2]}, common_kwargs={"x": 1}
        )


def test_sharded(group):
    future = group.run_all_workers_sharded_data(
        "add", value=[1, 2], in_sharded_axes=["data"], common_kwargs={"offset": 10}
    )
    assert results(group, future) == [16, 17]
    nested = group.run_all_workers_sharded_data(
        "add", value=[[1], [2]], in_sharded_axes=["data", "replica"]
    )
    assert nested.get_results(group) == [6, 7]


def test_replicated(group):
    future = group.run_all_workers_sharded_data(
        "echo", value=np.arange(4), replicate_on_axes=["data"]
    )
    answers = results(group, future)
    assert [kwargs["value"].tolist() for _, kwargs in answers] == [[0, 1, 2, 3]] * 2
    once = group.run_all_workers_sharded_data(
        "rank", replicate_on_axes=["data"], output_is_replicated=["data"]
    )
    assert once.called_workers == [0, 1]
    assert results(group, once) == [0]


def test_free_axes(group):
    future = group.run_all_workers_sharded_data("add", value=1)
    assert future.called_workers == [0]
    assert results(group, future) == [6]
    dummies = group.run_all_workers_sharded_data(
        "add", value=1, make_dummy_calls_to_free_axes=True
    )
    assert dummies.called_workers == [0, 1]
    assert results(group, dummies) == [6]
    assert ray.get(dummies.futures[1]) is None


def test_wrong_axes_and_lengths(group):
    with pytest.raises(ShardingError, match="replicate_on_axes names 'dat'"):
        group.run_all_workers_sharded_data("add", value=1, replicate_on_axes=["dat"])
    with pytest.raises(ShardingError, match=r"'value'.*got 3"):
        group.run_all_workers_sharded_data(
            "add", value=[1, 2, 3], in_sharded_axes=["data"]
        )


def test_positional_arguments_are_refused(group):
    with pytest.raises(TypeError, match="positional"):
        group.run_all_workers_single_data("add", 1)


def test_unknown_method(group):
    with pytest.raises(WorkerMethodError, match=r"no method 'ad'; did you mean 'add'"):
        group.run_all_workers_single_data("ad")


def test_references_pass_through(group):
    value = ray.put(np.arange(5))
    (_, kwargs), _ = results(
        group, group.run_all_workers_single_data("echo", value=value)
    )
    assert kwargs["value"].tolist() == [0, 1, 2, 3, 4]
    # From worker to worker: the second call gets the first one's result.
    first = group.run_single_worker_single_data("add", 0, value=1)
    second = group.run_all_workers_sharded_data(
        "add", value=[first, 2], in_sharded_axes=["data"]
    )
    assert results(group, second) == [11, 7]


def test_argument_names_do_not_clash(group):
    kwargs = {"self_": 1, "packed": 2}
    ref = ray.put(3)
    (answer,) = results(
        group, [group.run_single_worker_single_data("echo", 0, ref=ref, **kwargs)]
    )
    assert answer == (0, {"self_": 1, "packed": 2, "ref": 3})


def test_generators(group):
    future = group.run_all_workers_sharded_data(
        "count", up_to=[2, 3], in_sharded_axes=["data"]
    )
    assert results(group, future) == [0, 1, 100, 101, 102]
    once = group.run_all_workers_sharded_data(
        "count", up_to=2, replicate_on_axes=["data"], output_is_replicated=["data"]
    )
    assert results(group, once) == [0, 1]
    proxies = group.run_all_workers_sharded_data(
        "count", up_to=[1, 1], in_sharded_axes=["data"]
    ).get_results(group, return_generators_as_proxies=True)
    assert [[ray.get(ref) for ref in proxy] for proxy in proxies] == [[0], [100]]
    broken = group.run_all_workers_single_data("broken_count", up_to=1)
    with pytest.raises(WorkerMethodError, match="no more numbers"):
        results(group, broken)


def test_async_methods(group):
    assert results(group, group.run_all_workers_single_data("aecho", value=1)) == [1, 1]
    assert results(group, group.run_all_workers_single_data("acount", up_to=2)) == [
        0,
        1,
        0,
        1,
    ]


def test_method_that_raises(group):
    with pytest.raises(WorkerMethodError) as caught:
        results(group, group.run_all_workers_single_data("fail"))
    text = str(caught.value)
    assert "of group 'sample' (node 127.0.0.1, pid" in text
    assert "Sample.fail raised ValueError: the method broke" in text
    assert 'raise ValueError("the method broke")' in text
    assert "Log of the worker: /" in text
    assert "host.py" not in text


def test_user_error_comes_as_itself(group):
    with pytest.raises(ConfigError, match=r"^policy.size must be even") as caught:
        results(group, group.run_all_workers_single_data("user_fail"))
    (note,) = caught.value.__notes__
    assert "of group 'sample'" in note
    assert "method 'user_fail'" in note


def test_result_that_cannot_travel(group):
    with pytest.raises(WorkerMethodError, match=r"could not return its result.*lock"):
        results(group, group.run_all_workers_single_data("unpicklable"))


def test_failure_of_another_groups_worker_is_told_by_its_name(group, brittle):
    bad = brittle.run_single_worker_single_data("fail", 1)
    with pytest.raises(WorkerMethodError, match="worker 1 of group 'brittle'"):
        results(group, [group.run_single_worker_single_data("add", 0, value=bad)])


def test_without_named_axes(brittle):
    with pytest.raises(ShardingError, match="without sharding_annotations"):
        brittle.run_all_workers_sharded_data("rank")
    with pytest.raises(ShardingError, match="without sharding_annotations"):
        brittle.run_all_workers_single_data("rank", run_rank_0_only_axes=["data"])
    assert results(brittle, brittle.run_all_workers_single_data("rank")) == [0, 1]


def test_deadline_names_who_is_late(brittle):
    with pytest.raises(
        DeadlineExceededError, match=r"in 0.2 s.*worker 1 of group 'brittle'"
    ):
        results(
            brittle,
            [
                brittle.run_single_worker_single_data("rank", 0),
                brittle.run_single_worker_single_data("wait", 1),
            ],
            deadline_s=0.2,
        )
    # Also when it has passed before any wait began.
    calls = brittle.run_all_workers_single_data("wait")
    with pytest.raises(DeadlineExceededError, match=r"worker 0 of group 'brittle'"):
        results(brittle, calls, deadline_s=1e-9)
    with pytest.raises(DeadlineExceededError, match="worker 1 of group 'brittle'"):
        list(brittle.iter_results(calls, deadline_s=1e-9))
    with pytest.raises(ConfigError, match="deadline_s must be positive"):
        results(brittle, [], deadline_s=0)


@pytest.mark.parametrize("method", ["fail_on", "die_on"])
def test_one_failure_is_reported_while_the_others_wait(brittle, method):
    calls = brittle.run_all_workers_single_data(method, rank=1)
    with pytest.raises(WorkerError, match="worker 1 of group 'brittle'"):
        results(brittle, calls, deadline_s=60)


def test_killed_worker(brittle):
    refs = brittle.run_all_workers_single_data("wait")
    pid = brittle.worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        results(brittle, refs, deadline_s=60)
    text = str(caught.value)
    assert f"worker 1 of group 'brittle' (node 127.0.0.1, pid {pid}) is gone" in text
    assert "SYSTEM_ERROR" in text
    assert "SIGKILL" in text


def test_shutdown_leaves_no_process(cluster, tmp_path):
    file = tmp_path / "clean"
    variables = {"CLEAN_UP_FILE": str(file)}
    group = RayWorkerGroup(
        cluster, RayWorkerBuilder(SAMPLE), name_prefix="short", env_vars=variables
    )
    # The caller's arguments are unchanged.
    assert variables == {"CLEAN_UP_FILE": str(file)}
    children = results(group, group.run_all_workers_single_data("spawn_child"))
    pids = group.worker_pids + children
    assert all(map(is_alive, pids))
    assert group.shutdown(cleanup_method="write_on_clean_up")
    assert not any(map(is_alive, pids))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean.0", "clean.1"]
    assert group.shutdown()
    with pytest.raises(WorkerError, match="was shut down"):
        group.run_all_workers_single_data("rank")


@pytest.mark.parametrize("on_purpose", [True, False])
def test_workers_that_are_gone_are_not_cleaned_up(cluster, tmp_path, on_purpose):
    file = {"CLEAN_UP_FILE": str(tmp_path / "clean")}
    group = RayWorkerGroup(cluster, RayWorkerBuilder(SAMPLE), env_vars=file)
    if on_purpose:
        group.end([1], "fewer are needed")
    else:
        os.kill(group.worker_pids[1], signal.SIGKILL)
        deadline = time.monotonic() + 120
        while group.health()[1].failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
    # Live workers complete theirs, which is a success if none failed.
    assert group.shutdown(cleanup_method="write_on_clean_up") == on_purpose
    assert [path.name for path in tmp_path.iterdir()] == ["clean.0"]


def test_failed_clean_up_is_reported_and_does_not_stop_the_end(cluster):
    group = RayWorkerGroup(cluster, RayWorkerBuilder(SAMPLE), workers_per_node=1)
    (pid,) = group.worker_pids
    assert not group.shutdown(cleanup_method="fail", timeout=5)
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (f"{MODULE}.Sampel", WorkerStartError, "no class 'Sampel'; did you mean"),
        (f"{MODULE}.signal", WorkerStartError, "is a module, not a class"),
        ("no_such_module.Worker", WorkerStartError, "No module named 'no_such_module'"),
    ],
)
def test_class_that_cannot_be_loaded(cluster, path, error, words):
    with pytest.raises(error, match=words):
        RayWorkerGroup(cluster, RayWorkerBuilder(path), workers_per_node=1)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (
            "value",
            WorkerStartError,
            r"constructor of BrokenConstructor raised.*no good",
        ),
        ("user", ConfigError, "model folder 'x' does not exist"),
        ("die", WorkerStartError, "is gone .starting .*SYSTEM_ERROR"),
    ],
)
def test_constructor_that_fails(cluster, how, error, words):
    with pytest.raises(error, match=words):
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(f"{MODULE}.BrokenConstructor", how),
            workers_per_node=1,
            name_prefix="broken",
        )


def test_constructor_that_never_ends(cluster):
    builder = RayWorkerBuilder(f"{MODULE}.BrokenConstructor", "wait")
    for deadline_s in (3, 9, 27, 81):
        with pytest.raises(WorkerStartError, match="start_deadline_s") as caught:
            RayWorkerGroup(
                cluster, builder, workers_per_node=1, start_deadline_s=deadline_s
            )
        if "its constructor" in str(caught.value):
            return
    # On a busy machine a process may take long to exist at all.
    raise AssertionError(str(caught.value))


def test_interpreter_that_is_missing(cluster):
    builder = RayWorkerBuilder(SAMPLE).with_options(py_executable="/no/such/python")
    with pytest.raises(ActorEnvironmentError, match="no program on this machine"):
        RayWorkerGroup(cluster, builder)


def test_ranks_that_do_not_fit(cluster):
    with pytest.raises(ShardingError, match="from 0 to 1 once"):
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(SAMPLE),
            sharding_annotations=NamedSharding([0, 1, 2], ["data"]),
        )


def test_tied_group_and_configure_worker(cluster):
    builder = RayWorkerBuilder(f"{MODULE}.Configured", 3)
    with RayWorkerGroup(
        cluster, builder, name_prefix="tied", bundle_indices_list=[(0, [0, 1])]
    ) as group:
        assert group.dp_leader_worker_indices == [0]
        assert group.dp_size == 1
        assert results(group, group.run_all_workers_single_data("state")) == [
            (3, (0, [0, 1]), "yes"),
            (3, None, None),
        ]


def test_bundle_that_is_full(cluster, group):
    others = ["a", "b", "c"]
    for tenant in others:
        cluster.claim(tenant, [(0, 0)])
    try:
        with pytest.raises(
            ResourceInsufficientError,
            match=r"'Sample' finds no room on bundle \(0, 0\)",
        ):
            RayWorkerGroup(cluster, RayWorkerBuilder(SAMPLE))
    finally:
        for tenant in others:
            cluster.unclaim(tenant, [(0, 0)])


def test_class_object_and_caller_environment(cluster, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "1")

    class Local:
        def state(self, name):
            return os.environ.get(name), name in sys.modules

    with RayWorkerGroup(
        cluster,
        RayWorkerBuilder(Local),
        workers_per_node=1,
        env_vars={"OMP_NUM_THREADS": "3"},
    ) as group:
        for name, value in (("SECRET_OF_THE_CALLER", None), ("OMP_NUM_THREADS", "3")):
            (answer,) = results(
                group, group.run_all_workers_single_data("state", name=name)
            )
            assert answer == (value, False)


def test_wrong_env_vars(cluster):
    with pytest.raises(ConfigError, match="names to strings: got 'A': 1"):
        RayWorkerGroup(cluster, RayWorkerBuilder(SAMPLE), env_vars={"A": 1})
