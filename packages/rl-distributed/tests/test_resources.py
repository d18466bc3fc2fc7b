from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rl_distributed.cluster.config import ClusterSize
from rl_distributed.cluster.placement import NodeCapacity
from rl_distributed.cluster.resources import (
    GroupRequest,
    ResourceConfig,
    ResourceManager,
    check_clusters,
    plan_clusters,
)
from rl_distributed.errors import ConfigError, ResourceInsufficientError

TWO_CORES = [NodeCapacity("a", "127.0.0.1", 2)]
TWO_GPU_NODES = [NodeCapacity(n, "10.0.0.1", 64, 8) for n in "ab"]


def request(sizes, **more):
    groups = {name: GroupRequest(workers_per_node=size) for name, size in sizes.items()}
    return ResourceConfig(groups=groups, **more)


def test_apart_where_there_is_room():
    plans = plan_clusters(request({"a": 1, "b": 1}), TWO_CORES)
    assert [plan.groups for plan in plans] == [("a",), ("b",)]
    assert [plan.max_colocated_worker_groups for plan in plans] == [1, 1]


def test_colocated_where_there_is_no_room():
    (plan,) = plan_clusters(request({"a": 2, "b": 1, "c": 1}), TWO_CORES)
    assert plan.groups == ("a", "b", "c")
    assert plan.bundle_ct_per_node_list == (2,)
    assert plan.max_colocated_worker_groups == 3


def test_explicit_choices():
    together = request({"a": 1, "b": 1, "c": 1}, placement="colocated")
    assert len(plan_clusters(together, TWO_CORES)) == 1
    with pytest.raises(ResourceInsufficientError, match="beside the others"):
        plan_clusters(request({"a": 2, "b": 1}, placement="apart"), TWO_CORES)
    pair = request({"a": 1, "b": 1, "c": 1}, colocated=[["a", "c"]])
    assert [p.groups for p in plan_clusters(pair, TWO_CORES)] == [("a", "c"), ("b",)]


def test_nothing_fits():
    with pytest.raises(ResourceInsufficientError, match="needs 3 CPUs on one node"):
        plan_clusters(request({"a": 3, "b": 1}), TWO_CORES)


def test_gpus_are_found_and_cpu_groups_lie_beside_them():
    config = ResourceConfig(
        groups={
            "env": GroupRequest(workers_per_node=4, use_gpus=False),
            "train": GroupRequest(workers_per_node=8, num_nodes=2),
        }
    )
    env, train = plan_clusters(config, TWO_GPU_NODES)
    assert (env.use_gpus, train.use_gpus) == (False, True)
    assert train.bundle_ct_per_node_list == (8, 8)


def test_a_unified_cluster_needs_no_equal_blocks():
    uneven = [NodeCapacity(n, "10.0.0.1", c) for n, c in (("a", 3), ("b", 1))]
    group = GroupRequest(num_nodes=2, workers_per_node=2, unified=True)
    (plan,) = plan_clusters(ResourceConfig(groups={"a": group}), uneven)
    assert plan.unified
    strict = ResourceConfig(groups={"a": group}, placement_group_strategy="STRICT_PACK")
    with pytest.raises(ResourceInsufficientError, match="4 CPUs all on one node"):
        plan_clusters(strict, uneven)
    with pytest.raises(ResourceInsufficientError, match="on 2 nodes"):
        plan_clusters(
            ResourceConfig(groups={"a": group.replace(unified=False)}), uneven
        )


def test_resources_of_a_group_reach_its_cluster():
    nodes = [NodeCapacity("a", "10.0.0.1", 4, resources={"probe": 2})]
    config = ResourceConfig(
        groups={
            "a": GroupRequest(workers_per_node=2, bundle_resources={"probe": 1}),
            "b": GroupRequest(workers_per_node=2),
        }
    )
    manager = ResourceManager(config, nodes=nodes)
    assert manager.plan_for("a").describe() == "2 CPUs and 2 probe on 1 node for a"
    assert manager.cluster_for("a").bundle.resources == {"probe": 1}
    assert manager.cluster_for("b").bundle.resources == {}
    wider = GroupRequest(workers_per_node=3, bundle_resources={"probe": 1})
    with pytest.raises(ResourceInsufficientError, match="3 probe on one node"):
        plan_clusters(ResourceConfig(groups={"a": wider}), nodes)


def test_clusters_that_fit_alone_may_not_fit_together():
    train = ClusterSize(workers_per_node=8), ["policy", "critic"]
    beside = {"train": train, "sample": (ClusterSize(workers_per_node=8), ["sample"])}
    check_clusters(beside, TWO_GPU_NODES)
    beside["sample"] = ClusterSize(num_nodes=2, workers_per_node=5), ["sample"]
    with pytest.raises(ResourceInsufficientError, match=r"'sample', beside the others"):
        check_clusters(beside, TWO_GPU_NODES)
    # Without GPUs it fits beside them, and where nodes may come nothing is known.
    on_cpus = ClusterSize(num_nodes=2, workers_per_node=8, use_gpus=False)
    check_clusters({**beside, "sample": (on_cpus, ["sample"])}, TWO_GPU_NODES)
    late = ClusterSize(num_nodes=2, nodes_deadline_s=60)
    check_clusters({**beside, "sample": (late, ["sample"])}, TWO_GPU_NODES)


def test_a_packed_cluster_takes_one_node_where_that_has_room():
    packed = ClusterSize(
        workers_per_node=8, unified=True, placement_group_strategy="PACK"
    )
    whole = ClusterSize(workers_per_node=8)
    both = {"sample": (packed, ["sample"]), "train": (whole, ["policy"])}
    check_clusters(both, TWO_GPU_NODES)
    wide = packed.replace(num_nodes=2, workers_per_node=5)
    with pytest.raises(ResourceInsufficientError, match="'train', beside the others"):
        check_clusters({**both, "sample": (wide, ["sample"])}, TWO_GPU_NODES)


def test_a_bundle_of_a_gpu_needs_no_cpu():
    ClusterSize(use_gpus=True, bundle_resources={"CPU": 0})
    with pytest.raises(ConfigError, match="another resource beside 0 CPU"):
        ClusterSize(use_gpus=False, bundle_resources={"CPU": 0})


def test_cpus_of_a_bundle_that_are_named_replace_the_usual_ones():
    size = ClusterSize(workers_per_node=4, bundle_resources={"CPU": 0.5})
    check_clusters({"train": (size, ["policy"])}, TWO_CORES)
    size = ClusterSize(workers_per_node=1, bundle_resources={"CPU": 3})
    with pytest.raises(ResourceInsufficientError, match="needs 3 CPUs"):
        check_clusters({"train": (size, ["policy"])}, TWO_CORES)


def test_colocated_groups_are_described_in_turn():
    (plan,) = plan_clusters(request({"a": 2, "b": 1}), TWO_CORES)
    assert plan.describe() == "2 CPUs on 1 node for a, b in turn"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (request({}), "at least one worker group"),
        (
            ResourceConfig(
                groups={"a": GroupRequest(unified=True), "b": GroupRequest()},
                placement="colocated",
            ),
            "wants one placement group over all nodes",
        ),
        (
            ResourceConfig(
                groups={
                    "a": GroupRequest(bundle_resources={"probe": 1}),
                    "b": GroupRequest(),
                },
                placement="colocated",
            ),
            "'a' wants {'probe': 1.0} and 'b' none",
        ),
        (request({"a": 1}, colocated=[["b"]]), "names 'b', which is no group"),
        (request({"a": 1}, colocated=[["a", "a"]]), "more than once"),
        (
            ResourceConfig(
                groups={"a": GroupRequest(num_nodes=2), "b": GroupRequest()},
                placement="colocated",
            ),
            "spans 2 nodes",
        ),
        (
            ResourceConfig(
                groups={
                    "a": GroupRequest(use_gpus=True),
                    "b": GroupRequest(use_gpus=False),
                },
                colocated=[["a", "b"]],
            ),
            "uses GPUs",
        ),
    ],
)
def test_wrong_requests(config, words):
    with pytest.raises(ConfigError, match=words):
        plan_clusters(config, TWO_GPU_NODES)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=1),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from(["auto", "apart", "colocated"]),
)
def test_each_group_is_on_one_cluster_and_all_fit(sizes, cpus, placement):
    nodes = [NodeCapacity(str(i), "x", size) for i, size in enumerate(cpus)]
    try:
        plans = plan_clusters(request(sizes, placement=placement), nodes)
    except ResourceInsufficientError:
        assert placement == "apart" or max(sizes.values()) > max(cpus)
        return
    assert sorted(name for plan in plans for name in plan.groups) == sorted(sizes)
    assert sum(sum(plan.bundle_ct_per_node_list) for plan in plans) <= sum(cpus)
    for plan in plans:
        assert max(sizes[name] for name in plan.groups) == max(
            plan.bundle_ct_per_node_list
        )


def test_manager_gives_colocated_groups_the_same_cluster():
    manager = ResourceManager(request({"a": 2, "b": 1}), nodes=TWO_CORES)
    assert manager.cluster_for("a") is manager.cluster_for("b")
    assert manager.is_colocated("a", "b")
    assert manager.workers_per_node_of("b") == 1
    with pytest.raises(ConfigError, match="no group 'aa'"):
        manager.cluster_for("aa")
    manager.shutdown()
