from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from rl_distributed.cluster import reservation
from rl_distributed.cluster.placement import (
    Bundle,
    NodeCapacity,
    assign_blocks,
    check_unified_placement,
)
from rl_distributed.errors import ResourceInsufficientError


def cpu_nodes(*sizes):
    return [NodeCapacity(str(i), "10.0.0.1", size) for i, size in enumerate(sizes)]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_assignment_exists_exactly_where_brute_force_finds_one(blocks, sizes):
    def fits(choice):
        used = [0] * len(sizes)
        for block, node in zip(blocks, choice, strict=True):
            used[node] += block
        return all(u <= s for u, s in zip(used, sizes, strict=True))

    choices = itertools.product(range(len(sizes)), repeat=len(blocks))
    possible = any(fits(choice) for choice in choices)
    try:
        chosen = assign_blocks(blocks, Bundle(1), cpu_nodes(*sizes))
    except ResourceInsufficientError:
        assert not possible
    else:
        assert fits(chosen)


def test_blocks_go_to_different_nodes_where_possible():
    assert sorted(assign_blocks([2, 2], Bundle(1), cpu_nodes(8, 8))) == [0, 1]
    assert assign_blocks([1, 1], Bundle(1), cpu_nodes(2)) == [0, 0]


def test_further_resources_count():
    probes = [
        NodeCapacity(str(i), "10.0.0.1", 8, resources={"probe": amount})
        for i, amount in enumerate([0, 1, 2])
    ]
    bundle = Bundle(1, resources={"probe": 1})
    assert [node.num_bundles(bundle) for node in probes] == [0, 1, 2]
    assert probes[2].without(bundle, 2).resources == {"probe": 0}
    assert assign_blocks([2, 1], bundle, probes) == [2, 1]
    with pytest.raises(
        ResourceInsufficientError,
        match=r"needs 3 CPUs and 3 probe on one node; the cluster has 24 CPUs, 0 GPUs "
        "and 3 probe on 3 nodes, at most",
    ):
        assign_blocks([3], bundle, probes)


def test_the_shortage_is_named_in_one_sentence():
    gpus = [NodeCapacity("a", "10.0.0.1", 64, 8)]
    with pytest.raises(ResourceInsufficientError) as caught:
        assign_blocks([8, 8], Bundle(1, 1), gpus, what="cluster 'policy'")
    assert str(caught.value) == (
        "cluster 'policy' needs 16 CPUs and 16 GPUs on 2 nodes (8 CPUs and 8 GPUs on "
        "each); the cluster has 64 CPUs and 8 GPUs on 1 node; ask for fewer workers or "
        "add nodes"
    )


def test_many_nodes_are_quick():
    with pytest.raises(ResourceInsufficientError):
        assign_blocks([8] * 1001, Bundle(1), cpu_nodes(*[8] * 1000))
    assert (
        len(set(assign_blocks([8] * 1000, Bundle(1), cpu_nodes(*[8] * 1000)))) == 1000
    )


def test_messages_name_need_and_supply():
    with pytest.raises(
        ResourceInsufficientError,
        match=r"'c' needs 4 CPUs on one node; the cluster has 2 CPUs and 0 GPUs on 1",
    ):
        assign_blocks([4], Bundle(1), cpu_nodes(2), what="cluster 'c'")
    with pytest.raises(
        ResourceInsufficientError, match="4 CPUs and 2 GPUs on one node"
    ):
        assign_blocks([2], Bundle(2, 1), cpu_nodes(8, 8))
    with pytest.raises(ResourceInsufficientError, match="no node"):
        assign_blocks([1], Bundle(1), [])


@pytest.mark.parametrize(
    ("strategy", "count", "fits"),
    [
        ("PACK", 4, True),
        ("PACK", 5, False),
        ("STRICT_PACK", 3, True),
        ("STRICT_PACK", 4, False),
        ("STRICT_SPREAD", 2, True),
        ("STRICT_SPREAD", 3, False),
    ],
)
def test_unified_placement(strategy, count, fits):
    nodes = cpu_nodes(3, 1)
    if fits:
        check_unified_placement(count, Bundle(1), nodes, strategy)
    else:
        with pytest.raises(ResourceInsufficientError, match="ask for fewer workers"):
            check_unified_placement(count, Bundle(1), nodes, strategy)


def test_a_node_that_joins_during_the_wait_has_its_address(monkeypatch):
    """Others hold `a`, and an autoscaler adds `b` for what is asked for."""
    a, b = (NodeCapacity(name, f"10.0.0.{name}", 4.0) for name in "ab")
    group = SimpleNamespace(bundle_count=1, wait=lambda deadline_s: True)
    table = {"state": "CREATED", "bundles_to_node_id": {0: "b"}}
    monkeypatch.setattr(reservation, "placement_group", lambda *args, **more: group)
    monkeypatch.setattr(reservation, "placement_group_table", lambda group: table)
    monkeypatch.setattr(reservation, "live_nodes", lambda: [a, b])
    found = reservation.reserve_bundles([1], Bundle(1.0), [a], what="c", deadline_s=60)
    [[slot]] = found.slots
    assert (slot.node_id, slot.address) == ("b", "10.0.0.b")
