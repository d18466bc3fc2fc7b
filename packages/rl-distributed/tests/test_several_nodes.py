from __future__ import annotations

import itertools

import pytest
from rl_distributed_scripts import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    """Findings of a program on a cluster of three simulated nodes."""
    return run_script("several_nodes.py")


def test_blocks_lie_on_nodes_of_one_nvlink_domain(found):
    nodes, domains = zip(*found["two_nodes"], strict=True)
    assert set(domains) == {"joined"}
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


@pytest.mark.parametrize("kind", ["three_nodes", "cpu_only"])
def test_each_block_has_a_node_of_its_own(found, kind):
    rows = found[kind]
    assert [len(set(row)) for row in rows] == [1, 1, 1]
    assert len({row[0] for row in rows}) == 3


def test_gpus_are_found(found):
    assert found["from_config"]


def test_bundles_with_a_resource_lie_where_it_is(found):
    (first,), (second,) = found["with_resource"]
    joined = {node for node, _ in found["two_nodes"]}
    assert {first, second} == joined


def test_unified_placement_by_every_strategy(found):
    nodes = {name: len(set(found["unified"][name])) for name in found["unified"]}
    # SPREAD only prefers: resources of the last cluster may not be released yet.
    assert nodes.pop("SPREAD") > 1
    assert nodes == {"PACK": 3, "STRICT_PACK": 1, "STRICT_SPREAD": 3}
    for order in found["unified"].values():
        # Bundles of a node are consecutive.
        changes = sum(a != b for a, b in itertools.pairwise(order))
        assert changes == len(set(order)) - 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("per_node", "16 CPUs and 16 GPUs on 2 nodes (8 CPUs and 8 GPUs on each)"),
        ("too_many", "needs 8 CPUs and 8 GPUs on 4 nodes"),
        ("resource", "6 GPUs and 2 probe on 3 nodes"),
        ("unknown", "0 prob on 3 nodes"),
        ("PACK", "in 7 equal bundles"),
        ("SPREAD", "in 7 equal bundles"),
        ("STRICT_PACK", "3 CPUs and 3 GPUs all on one node (STRICT_PACK)"),
        ("STRICT_SPREAD", "each on its own node (STRICT_SPREAD)"),
    ],
)
def test_what_does_not_fit_is_refused_without_a_wait(found, case, words):
    kind, message = found["refused"][case]
    assert kind == "ResourceInsufficientError"
    assert words in message
    assert "; the cluster has 6 CPUs, 6 GPUs" in message.replace(
        "6 CPUs and", "6 CPUs,"
    )


def test_a_lost_node_counts_no_more(found):
    kind, message = found["after_loss"]
    assert kind == "ResourceInsufficientError"
    assert "the cluster has 4 CPUs and 4 GPUs on 2 nodes" in message


def test_tied_groups_span_nodes(found):
    assert found["tied_groups"] == 2
    groups = [found["tied_nodes"][:3], found["tied_nodes"][3:]]
    # Three workers with two GPUs each: one node hosts two, the third is shared.
    assert [len(set(group)) for group in groups] == [2, 2]
    assert len(set(found["tied_nodes"])) == 3
    names = ("RANK", "NODE_RANK", "WORLD_SIZE")
    variables = [[int(env[name]) for name in names] for env in found["tied_env"]]
    assert [row[0] for row in variables] == list(range(6))
    assert {row[1] for row in variables} == {0, 1, 2}
    assert {row[2] for row in variables} == {6}


def test_a_process_group_over_nodes(found):
    assert found["all_reduce"] == [3.0, 3.0]


def test_colocated_groups_take_turns(found):
    assert found["colocated"] == [[2] * 8, True]


def test_failures_of_a_worker_on_another_node_are_noticed(found):
    assert found["far_failures"] == [
        ["WorkerHungError", True, True],
        ["WorkerDiedError", True, True],
    ]
    assert found["far_group_answers"]


def test_ports_on_nodes_that_share_a_machine_differ(found):
    assert len(found["ports"]) == 15
    assert len(set(found["ports"])) == 15
