"""Calls to replicas of several workers, and their answers."""

from __future__ import annotations

import threading

import pytest
import ray
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import WorkerDiedError, WorkerMethodError
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.row_checks import (
    check_same_rows,
    check_versions,
    rows_digest,
)
from rl_models.policy.weight_updates import ServedWeights, WeightUpdates
from rl_models.replicas import workers as replica_workers
from rl_models.replicas.broadcast import Broadcast
from rl_models.replicas.workers import ReplicaCall, ReplicaWorkers
from rl_models.weight_request import LoadReport, WeightRequest


def test_workers_that_went_apart_are_found():
    output = BatchedDataDict(output_ids=torch.tensor([[3, 4], [5, 6]]))
    other = BatchedDataDict(output_ids=torch.tensor([[3, 4], [5, 7]]))
    check_same_rows(output, [], 0)
    check_same_rows(output, [rows_digest(output), None], 0)
    with pytest.raises(GenerationError, match="generation replica 3 sampled different"):
        check_same_rows(output, [rows_digest(output), rows_digest(other)], 3)


def test_rows_of_older_weights_are_refused():
    mixed = BatchedDataDict(weight_version=torch.tensor([4, 3, 4]))
    check_versions([mixed], oldest=3)
    with pytest.raises(GenerationError, match=r"version \[3, 4\], but all have"):
        check_versions([mixed], oldest=4)


@pytest.mark.slow
def test_a_worker_that_fails_alone_ends_the_call_of_its_replica(
    ray_cluster, monkeypatch
):
    monkeypatch.setattr(replica_workers, "_ALONE_S", 0.1)

    def wait_for_peer():
        threading.Event().wait(600)

    def fail():
        raise ValueError("no memory left")

    workers = ReplicaWorkers(None, 2)
    waiting = ray.remote(num_cpus=0)(wait_for_peer).remote()
    try:
        call = ReplicaCall(
            0, {0: waiting, 1: ray.remote(num_cpus=0)(fail).remote()}, "generate"
        )
        assert workers.finished([call], 60) == [call]
        with pytest.raises(WorkerDiedError, match=r"(?s)replica 0 failed .*no memory"):
            workers.results(call, 60)
    finally:
        ray.cancel(waiting, force=True)
    # If both fail, the rows are at fault.
    both = [ray.remote(num_cpus=0)(fail).remote() for _ in range(2)]
    ray.wait(both, num_returns=2, timeout=60)
    call = ReplicaCall(0, dict(enumerate(both)), "generate")
    assert workers.finished([call], 60) == [call]
    with pytest.raises(WorkerMethodError, match="no memory"):
        workers.results(call, 60)


class Confirmations:
    """Two replicas of two workers with given answers to an update."""

    name = "generation"
    supervisor = None

    def __init__(self, reports):
        self.reports = reports
        self.live = [0, 1]
        self.have = []

    def run_single_worker_single_data(self, method, rank, **arguments):
        return ray.put(self.reports[rank])

    def updated(self, replicas):
        self.have = replicas

    def start_weight_update(self, request):
        every = Broadcast(ReplicaWorkers(self, 2), self)
        return WeightUpdates(every, ServedWeights()).start([], request)


@pytest.mark.slow
def test_every_worker_confirms_what_it_loaded(ray_cluster):
    right = [LoadReport(rank // 2, 4, "aa") for rank in range(4)]
    request = WeightRequest(4)
    policy = Confirmations(right)
    policy.start_weight_update(request).wait(60)
    assert policy.have == [0, 1]
    for wrong, words in (
        (LoadReport(1, 4, "bb"), "replica 1 confirmed version 4 with manifest bb"),
        (LoadReport(1, 3, "aa"), "replica 1 confirmed version 3"),
        (LoadReport(1, None, problem="rank 1 got half"), "rank 1 got half"),
    ):
        policy = Confirmations([*right[:3], wrong])
        with pytest.raises(WeightSyncError, match=words):
            policy.start_weight_update(request).wait(60)
        assert policy.have == []
