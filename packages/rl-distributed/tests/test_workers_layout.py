from __future__ import annotations

import pytest

from rl_distributed.cluster.virtual_cluster import WorkerSlot
from rl_distributed.errors import ConfigError
from rl_distributed.workers.layout import lay_out_workers


def two_nodes(size=4):
    return [
        [WorkerSlot(node, bundle, f"node{node}", "10.0.0.1") for bundle in range(size)]
        for node in range(2)
    ]


def test_one_worker_per_bundle():
    seats = lay_out_workers(two_nodes())
    assert [seat.bundle for seat in seats] == [(n, b) for n in (0, 1) for b in range(4)]
    assert [seat.rank for seat in seats] == list(range(8))
    assert [seat.node_rank for seat in seats] == [0] * 4 + [1] * 4
    assert [seat.local_rank for seat in seats] == [0, 1, 2, 3] * 2
    assert all(seat.leads_with is not None for seat in seats)


@pytest.mark.parametrize("per_node", [1, [1, 1]])
def test_fewer_workers_than_bundles(per_node):
    assert [s.bundle for s in lay_out_workers(two_nodes(), per_node)] == [
        (0, 0),
        (1, 0),
    ]


def test_tied_groups():
    seats = lay_out_workers(
        two_nodes(), bundle_indices_list=[(0, [0, 1]), (0, [2, 3]), (1, [1, 0])]
    )
    assert [s.bundle for s in seats][-2:] == [(1, 1), (1, 0)]
    assert [s.tied_group for s in seats] == [0, 0, 1, 1, 2, 2]
    leaders = [s.leads_with for s in seats if s.leads_with is not None]
    assert leaders == [(0, (0, 1)), (0, (2, 3)), (1, (1, 0))]
    assert [s.local_rank for s in seats] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers_per_node": 5}, "between 0 and the 4 bundles"),
        ({"workers_per_node": [1]}, "each of the 2 nodes"),
        ({"workers_per_node": "2"}, "must be a number"),
        ({"workers_per_node": 0}, "no worker at all"),
        ({"bundle_indices_list": [(0, [9])]}, r"names bundle \(0, 9\)"),
        ({"bundle_indices_list": [(0, [1]), (0, [1])]}, "twice"),
        ({"bundle_indices_list": [(0, [])]}, "without bundles"),
        ({"bundle_indices_list": []}, "has no group"),
        ({"bundle_indices_list": [(0, [1])], "workers_per_node": 1}, "exclude"),
    ],
)
def test_wrong_layouts(arguments, words):
    with pytest.raises(ConfigError, match=words):
        lay_out_workers(two_nodes(), **arguments)
