"""`WorkerPool`: independent items, on workers that may be killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from rl_distributed_sample_workers import Trial

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError, WorkerDiedError, WorkerMethodError
from rl_distributed.workers import Retry, WorkerPool


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with (
        RayVirtualCluster([2], name="pool") as cluster,
        WorkerPool(cluster, Trial, name="pool") as pool,
    ):
        yield pool


def wait_until_idle(pool):
    end = time.monotonic() + 120
    while pool.num_idle < 2:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_sweep_gives_every_item_its_value(pool):
    results = list(pool.map(Trial.square, range(24)))
    assert {r.item: r.get() for r in results} == {i: i * i for i in range(24)}
    assert {r.attempts for r in results} == {1}


def test_results_come_in_order_where_asked(pool):
    found = [r.value for r in pool.map(Trial.square, range(8), ordered=True)]
    assert found == [i * i for i in range(8)]


def test_an_item_that_fails_leaves_the_others_their_values(pool):
    results = list(pool.map(Trial.square, [1, "two", 3], ordered=True))
    assert [r.value for r in results] == [1, None, 9]
    assert isinstance(results[1].error, WorkerMethodError)
    assert results[1].attempts == 1
    with pytest.raises(WorkerMethodError, match="TypeError"):
        results[1].get()


def test_named_errors_are_tried_again(pool, tmp_path):
    retries = Retry(3, backoff_s=0.01, on=OSError)
    path = str(tmp_path / "second")
    [result] = pool.map(Trial.fail_once, [path], retries=retries)
    assert (result.value, result.attempts, len(result.errors)) == (path, 2, 1)


def test_the_item_of_a_killed_worker_is_tried_again(pool, tmp_path):
    before = set(pool.group.worker_pids)
    markers = [str(tmp_path / str(i)) for i in range(4)]
    results = list(pool.map(Trial.die_once, markers))
    assert sorted(r.get() for r in results) == markers
    assert all(isinstance(r.errors[0], WorkerDiedError) for r in results)
    assert {r.attempts for r in results} == {2}
    wait_until_idle(pool)
    assert not before & set(pool.group.worker_pids)


def test_an_item_that_always_ends_its_worker_is_given_up(pool):
    [result] = pool.map(Trial.die, [signal.SIGKILL], retries=Retry(2))
    assert isinstance(result.error, WorkerDiedError)
    assert result.attempts == 2


def test_a_worker_that_is_killed_while_idle_costs_no_attempt(pool):
    wait_until_idle(pool)
    os.kill(pool.group.worker_pids[0], signal.SIGKILL)
    results = list(pool.map(Trial.square, range(24)))
    assert sorted(r.get() for r in results) == [i * i for i in range(24)]


def test_an_iteration_that_is_left_gives_its_workers_back(pool):
    results = pool.map(Trial.square, range(100))
    next(results)
    results.close()
    assert len(list(pool.map(Trial.square, range(4)))) == 4


def test_methods_by_name_take_mappings(pool):
    [result] = pool.map("square", [{"number": 3}])
    assert result.value == 9
    with pytest.raises(ConfigError, match=r"mappings .* got 3"):
        list(pool.map("square", [3]))


def test_a_retry_without_an_attempt_is_refused():
    with pytest.raises(ConfigError, match="attempts must be at least 1: got 0"):
        Retry(0)
