from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from rl_distributed.cluster.placement import Bundle, NodeCapacity
from rl_distributed.cluster.topology import (
    BundlePlace,
    detect_nvlink_domain,
    nvlink_domain_of,
    order_bundles,
    order_nodes,
    split_into_groups,
)
from rl_distributed.errors import ConfigError


@st.composite
def topologies(draw):
    """Generate bundles on made-up nodes: some in domains, some alone."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    places, bundle = [], 0
    for number, size in enumerate(sizes):
        domain = draw(st.sampled_from(["", "", "a", "b", f"node{number}"]))
        address = draw(
            st.sampled_from(["10.0.0.9", "10.0.0.10", "fd00::1", "host", ""])
        )
        for _ in range(size):
            places.append(BundlePlace(bundle, f"node{number}", address, domain))
            bundle += 1
    return places


def runs(values):
    """Return the values without consecutive repetitions."""
    values = list(values)
    return [v for i, v in enumerate(values) if i == 0 or values[i - 1] != v]


@given(topologies(), st.randoms(use_true_random=False))
def test_order_keeps_domains_and_nodes_together(places, randomness):
    ordered = order_bundles(places)
    assert sorted(ordered, key=lambda p: p.bundle) == places
    domains = runs(place.domain for place in ordered)
    assert len(domains) == len(set(domains))
    nodes = runs(place.node_id for place in ordered)
    assert len(nodes) == len(set(nodes))
    for node in nodes:
        inside = [place.bundle for place in ordered if place.node_id == node]
        assert inside == sorted(inside)
    shuffled = list(places)
    randomness.shuffle(shuffled)
    assert order_bundles(shuffled) == ordered


def test_addresses_are_ordered_as_numbers():
    places = [BundlePlace(i, f"n{i}", f"10.0.0.{i}") for i in (10, 9, 100)]
    assert [place.bundle for place in order_bundles(places)] == [9, 10, 100]


def test_a_node_id_is_no_domain_name():
    places = [BundlePlace(0, "x", "10.0.0.1"), BundlePlace(1, "y", "10.0.0.2", "x")]
    assert places[0].domain != places[1].domain


def pieces(places, level):
    counts: dict[object, int] = {}
    for place in places:
        counts[level(place)] = counts.get(level(place), 0) + 1
    return counts.values()


@given(topologies(), st.integers(1, 6))
def test_groups_are_as_near_as_can_be(places, size):
    places = places[: len(places) - len(places) % size]
    groups = split_into_groups(random.sample(places, len(places)), size)
    assert sorted(p.bundle for group in groups for p in group) == [
        p.bundle for p in places
    ]
    assert all(len(group) == size for group in groups)
    on_one_node = sum(len({p.node_id for p in group}) == 1 for group in groups)
    in_one_domain = sum(len({p.domain for p in group}) == 1 for group in groups)
    assert on_one_node == sum(n // size for n in pieces(places, lambda p: p.node_id))
    assert in_one_domain == sum(n // size for n in pieces(places, lambda p: p.domain))


@pytest.mark.parametrize("size", [0, 3])
def test_groups_must_divide(size):
    places = [BundlePlace(i, "n") for i in range(4)]
    with pytest.raises(ConfigError, match=rf"groups of {size}; the size must divide"):
        split_into_groups(places, size)


def nodes_of(**domains):
    """Return one GPU node per number of GPUs, in the named domain."""
    return [
        NodeCapacity(f"{domain}{i}", "10.0.0.1", 64, gpus, domain)
        for domain, sizes in domains.items()
        for i, gpus in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("num_bundles", "first"),
    [(8, "small"), (16, "small"), (17, "large"), (32, "large"), (33, "huge")],
)
def test_the_smallest_domain_with_room_is_taken(num_bundles, first):
    nodes = nodes_of(large=[8] * 4, small=[8, 8], huge=[8] * 6)
    ordered = order_nodes(nodes, Bundle(1, 1), num_bundles)
    assert ordered[0].nvlink_domain == first
    assert sorted(n.node_id for n in ordered) == sorted(n.node_id for n in nodes)
    assert runs(n.nvlink_domain for n in ordered).count(first) == 1


def test_without_a_domain_with_room_the_largest_come_first():
    nodes = nodes_of(a=[8], b=[8] * 3, c=[8] * 2)
    ordered = order_nodes(nodes, Bundle(1, 1), 100)
    assert runs(n.nvlink_domain for n in ordered) == ["b", "c", "a"]


def test_nodes_without_domains_keep_their_order():
    nodes = [NodeCapacity(name, "10.0.0.1", 4) for name in "cab"]
    assert order_nodes(nodes, Bundle(1), 4) == nodes


@pytest.mark.parametrize(
    ("labels", "domain"),
    [
        (None, ""),
        ({}, ""),
        ({"ray.io/gpu-domain": "rack-1"}, "rack-1"),
        ({"rl/nvlink-domain": "x", "ray.io/gpu-domain": "rack-1"}, "x"),
        ({"rl/nvlink-domain": "", "ray.io/gpu-domain": "rack-1"}, "rack-1"),
    ],
)
def test_domains_come_from_labels(labels, domain):
    assert nvlink_domain_of(labels) == domain


class FakeNvmlError(Exception):
    pass


def fake_nvml(*, state=3, uuid=b"\x01" * 16, works=True):
    class Info:
        def __init__(self):
            self.clusterUuid, self.cliqueId, self.state = uuid, 7, state

    def init():
        if not works:
            raise FakeNvmlError("no driver")

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        c_nvmlGpuFabricInfoV_t=Info,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetGpuFabricInfoV=lambda device, info: None,
    )


@pytest.mark.parametrize(
    ("module", "domain"),
    [
        (fake_nvml(), "01" * 16 + ".7"),
        (fake_nvml(state=1), ""),
        (fake_nvml(uuid=b"\x00" * 16), ""),
        (fake_nvml(works=False), ""),
        (None, ""),
    ],
)
def test_nvml_names_the_domain(monkeypatch, module, domain):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr("ctypes.byref", lambda value: value)
    assert detect_nvlink_domain() == domain


def test_nvml_of_this_machine_answers():
    assert isinstance(detect_nvlink_domain(), str)
