from __future__ import annotations

import itertools
import threading
import time

import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    CallCancelledError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerMethodError,
)
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers import (
    FailFast,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartWorker,
    is_cancelled,
    stop_if_cancelled,
)

SAMPLE = "rl_distributed_sample_workers.Sample"
COUNTER = "rl_distributed_sample_workers.Counter"


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], max_colocated_worker_groups=3, name="streams") as c:
        yield c


def make(cluster, worker_class, policy=None):
    return RayWorkerGroup(
        cluster,
        RayWorkerBuilder(worker_class),
        name_prefix="streams",
        sharding_annotations=NamedSharding([0, 1], ["data"]),
        failure_policy=policy,
    )


@pytest.fixture(scope="module")
def samples(cluster):
    with make(cluster, SAMPLE) as group:
        yield group


@pytest.fixture(scope="module")
def counters(cluster):
    with make(cluster, COUNTER, RestartWorker(max_restarts=20, backoff_s=0)) as group:
        yield group


def count(group, first, second):
    return group.run_all_workers_sharded_data(
        "count", up_to=[first, second], in_sharded_axes=["data"]
    )


def start(group, method, **arguments):
    """Call all workers, and wait until the method runs in each."""
    future = group.future_of(group.run_all_workers_single_data(method, **arguments))
    end = time.monotonic() + 60
    pause = threading.Event()
    while {worker.method for worker in group.health()} != {method}:
        assert time.monotonic() < end, group.health()
        pause.wait(0.02)
    return future


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (0, 2), (40, 60)])
def test_every_item_comes_once_and_in_order(samples, sizes):
    expected = [
        (rank, position, rank * 100 + position)
        for rank, size in enumerate(sizes)
        for position in range(size)
    ]
    assert list(samples.iter_results(count(samples, *sizes))) == expected
    mixed = list(samples.iter_results(count(samples, *sizes), ordered=False))
    assert sorted(mixed) == expected
    for rank in (0, 1):
        own = [item for item in mixed if item.rank == rank]
        assert own == sorted(own)


def test_results_of_plain_methods_come_one_by_one(samples, tmp_path):
    path = tmp_path / "go on"

    def call():
        return samples.run_all_workers_multiple_data(
            "return_when_there", path=[str(path), "/"], value=["slow", "fast"]
        )

    stream = samples.iter_results(call(), ordered=False, deadline_s=60)
    assert next(stream).value == "fast"
    path.touch()
    assert [result.value for result in stream] == ["slow"]
    assert list(samples.iter_results(call())) == [(0, 0, "slow"), (1, 0, "fast")]


def test_only_those_that_answer_are_iterated(samples):
    future = samples.run_all_workers_sharded_data(
        "count", up_to=2, replicate_on_axes=["data"], output_is_replicated=["data"]
    )
    assert [item.value for item in samples.iter_results(future)] == [0, 1]


def test_first_items_come_before_the_last_are_made(counters):
    future = counters.future_of(counters.run_all_workers_single_data("count_for_ever"))
    stream = counters.iter_results(future, ordered=False, deadline_s=60)
    seen = list(itertools.islice(stream, 20))
    for rank in (0, 1):
        own = [item.value for item in seen if item.rank == rank]
        assert own == list(range(len(own)))
    assert future.cancel(grace_s=60)
    assert counters.get_all_worker_results(
        counters.run_all_workers_single_data("wait", seconds=0)
    ) == ["done", "done"]


def test_error_in_a_stream_comes_after_what_was_made(samples):
    reference = samples.run_single_worker_single_data("broken_count", 1, up_to=1)
    seen = []
    with pytest.raises(WorkerMethodError, match="no more numbers") as caught:
        seen.extend(
            item.value for item in samples.iter_results([reference], deadline_s=60)
        )
    assert caught.value.failure.method == "broken_count"


def test_death_in_a_stream_loses_and_doubles_nothing(counters):
    future = counters.run_all_workers_single_data("count_and_die", up_to=5, rank=1)
    seen = []
    with pytest.raises(WorkerDiedError, match="worker 1 of group 'streams'") as caught:
        seen.extend(counters.iter_results(future, ordered=False, deadline_s=60))
    for rank in (0, 1):
        own = [item.value for item in seen if item.rank == rank]
        assert own == list(range(len(own)))
    sizes = [sum(item.rank == rank for item in seen) for rank in (0, 1)]
    (note,) = caught.value.__notes__
    assert note.endswith(f"worker 0: {sizes[0]}, worker 1: {sizes[1]}")
    # The policy has restored the worker before the error arrived.
    assert [worker.state for worker in counters.health()] == ["idle", "idle"]


def test_deadline_of_a_stream(counters):
    future = start(counters, "wait")
    with pytest.raises(DeadlineExceededError, match=r"method 'wait' .*0\.5 s.*worker"):
        list(counters.iter_results(future, deadline_s=0.5))
    assert not future.cancel(grace_s=0.1)
    counters.recover()


def test_queued_call_is_dropped(counters, tmp_path):
    path = tmp_path / "go on"
    running = counters.run_all_workers_single_data("return_when_there", path=str(path))
    queued = counters.future_of(
        counters.run_all_workers_single_data("write", path=str(tmp_path / "no"))
    )
    # The worker is busy with another call, so it is not killed for this one.
    assert queued.cancel(grace_s=0.2)
    path.touch()
    assert counters.get_all_worker_results(running) == ["done", "done"]
    with pytest.raises(CallCancelledError, match=r"method 'write'.*was cancelled"):
        queued.get_results()
    with pytest.raises(CallCancelledError):
        list(queued.iter_results())
    # It would have run before this one.
    later = counters.run_all_workers_single_data("pid")
    assert counters.get_all_worker_results(later) == counters.worker_pids
    assert not (tmp_path / "no").exists()


def test_running_call_is_told(counters, tmp_path):
    path = tmp_path / "cancelled"
    pids = counters.worker_pids
    future = start(counters, "wait_until_cancelled", path=str(path))
    assert future.cancel(grace_s=60)
    assert path.read_text() == "cancelled"
    assert start(counters, "await_for_ever").cancel(grace_s=60)
    assert counters.worker_pids == pids


def test_call_that_does_not_listen_is_ended_by_force(counters):
    pids = counters.worker_pids
    future = start(counters, "wait")
    assert not future.cancel(grace_s=0.5, force=False)
    assert not future.cancel(grace_s=0.5)
    with pytest.raises(CallCancelledError):
        future.get_results()
    assert counters.get_all_worker_results(
        counters.run_all_workers_single_data("wait", seconds=0)
    ) == ["done", "done"]
    assert not set(pids) & set(counters.worker_pids)


def test_worker_ended_by_force_stays_away_without_restarts(cluster):
    with make(cluster, COUNTER, FailFast()) as group:
        future = start(group, "wait")
        assert not future.cancel(grace_s=0.2)
        with pytest.raises(CallCancelledError, match="did not stop when told to"):
            group.run_all_workers_single_data("wait")


def test_nothing_is_cancelled_outside_of_workers():
    assert not is_cancelled()
    stop_if_cancelled()
