"""A group whose threads outnumber a node's cores is warned once."""

from __future__ import annotations

import pytest

from rl_distributed import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup
from rl_distributed.workers.thread_count import crowding, usable_cores


@pytest.mark.parametrize(
    ("places", "num_threads"),
    [
        ([("a", 2), ("a", 2)], 1),
        ([("a", 8)] * 4, 2),
        ([("a", 2), ("b", 2)], 2),
        # A single worker: its threads disturb no other worker.
        ([("a", 2)], 4),
        ([], 4),
    ],
)
def test_threads_that_have_a_core_each_are_no_news(places, num_threads):
    assert crowding("policy", places, num_threads, "policy.num_threads") is None


def test_a_crowded_node_is_named_with_the_numbers_and_the_key():
    places = [("a", 8), ("a", 8), ("b", 4), ("b", 4), ("b", 4)]
    found = crowding("critic", places, 3, "critic.num_threads")
    assert found is not None
    assert found.startswith(
        "3 workers of group 'critic' compute with critic.num_threads=3 on node b, "
        "which has 4 cores for their 9 threads"
    )
    assert found.endswith("; set critic.num_threads to 1")
    found = crowding("policy", [("a", 2)] * 3, 1, "policy.num_threads")
    assert found is not None
    assert found.endswith("; start fewer workers per node")


class Idle:
    """Does nothing."""


def test_a_group_knows_the_cores_of_its_nodes(ray_cluster, caplog):
    cores = usable_cores()
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Idle)) as group,
    ):
        with caplog.at_level("WARNING"):
            group.warn_of_crowding(None, "num_threads")
            group.warn_of_crowding(max(1, cores // 2), "num_threads")
        expected = cores < 2  # not even one core per worker
        assert bool(caplog.records) == expected
        caplog.clear()
        with caplog.at_level("WARNING"):
            group.warn_of_crowding(cores, "num_threads")
    (record,) = caplog.records
    assert f"has {cores} cores for their {2 * cores} threads" in record.getMessage()
