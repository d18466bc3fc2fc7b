from __future__ import annotations

import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.collectives import process_group
from rl_distributed.errors import DistributedError
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup


def test_process_group_of_a_worker_group(ray_cluster):
    builder = RayWorkerBuilder("rl_distributed_sample_collectives.Rendezvous")
    with (
        RayVirtualCluster([2]) as cluster,
        RayWorkerGroup(cluster, builder, name_prefix="gloo") as group,
    ):

        def run(method, **lists):
            refs = group.run_all_workers_multiple_data(method, **lists)
            return group.get_all_worker_results(refs, deadline_s=60)

        assert run("total", value=[1, 2]) == [3.0, 3.0]
        rows = [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0]]
        assert run("rebalance", rows=[1, 2]) == [rows, rows]
        assert run("jagged", items=[["a"], ["b", "c"]]) == [["a", "b", "c"]] * 2
        assert group.shutdown(cleanup_method="close")


def test_variables_are_needed(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(DistributedError, match=r"\['RANK'.*RayWorkerGroup sets"),
        process_group(),
    ):
        pass
