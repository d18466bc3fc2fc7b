"""`MultiWorkerFuture.outcomes`: every worker has a value or an explained error."""

from __future__ import annotations

import os
import signal

import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    CallCancelledError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerMethodError,
)
from rl_distributed.workers import RayWorkerGroup

SAMPLE = "rl_distributed_sample_workers.Sample"


@pytest.fixture
def group(ray_cluster):
    with (
        RayVirtualCluster([2], name="outcomes") as cluster,
        RayWorkerGroup(cluster, SAMPLE, name_prefix="outcomes") as group,
    ):
        yield group


def outcomes(group, method, deadline_s=60.0, **arguments):
    future = group.future_of(group.run_all_workers_multiple_data(method, **arguments))
    return {outcome.rank: outcome for outcome in future.outcomes(deadline_s)}


def test_a_worker_that_raises_leaves_the_others_their_results(group):
    found = outcomes(group, "add", value=[1, "one"])
    assert (found[0].value, found[0].error) == (1, None)
    assert isinstance(found[1].error, WorkerMethodError)
    assert "worker 1" in str(found[1].error)
    counted = outcomes(group, "count", up_to=[2, 3])
    assert [len(counted[rank].value) for rank in (0, 1)] == [2, 3]


def test_a_worker_that_is_killed_leaves_the_others_their_results(group, tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    future = group.future_of(
        group.run_all_workers_multiple_data(
            "return_when_there", path=paths, value=["a", "b"]
        )
    )
    found = future.outcomes(120.0)
    os.kill(group.worker_pids[0], signal.SIGKILL)
    first = next(found)
    assert first.rank == 0
    assert isinstance(first.error, WorkerDiedError)
    assert "return_when_there" in str(first.error)
    paths[1].write_text("")
    assert [(o.rank, o.value, o.error) for o in found] == [(1, "b", None)]


def test_workers_that_are_late_have_an_error_each(group, tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    paths[0].write_text("")
    arguments = {"path": paths, "value": ["a", "b"]}
    # Long enough for the first, which has nothing to wait for.
    found = outcomes(group, "return_when_there", deadline_s=10.0, **arguments)
    assert found[0].value == "a"
    assert isinstance(found[1].error, DeadlineExceededError)
    assert "worker 1" in str(found[1].error)


def test_a_cancelled_call_has_no_outcomes(group):
    future = group.future_of(group.run_all_workers_single_data("rank"))
    future.cancel()
    with pytest.raises(CallCancelledError):
        future.outcomes()
