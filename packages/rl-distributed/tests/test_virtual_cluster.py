from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import pickle
import re

import psutil
import pytest
import ray
from ray._private.node import Node

from rl_distributed.cluster import start as ray_start
from rl_distributed.cluster.config import ClusterConfig
from rl_distributed.cluster.ray_processes import only_needed_processes
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster, init_ray
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    ResourceInsufficientError,
    UserError,
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bundle_ct_per_node_list": []}, "bundle_ct_per_node_list"),
        ({"bundle_ct_per_node_list": [0]}, "positive number of bundles"),
        ({"bundle_ct_per_node_list": [True]}, "positive number of bundles"),
        (
            {"bundle_ct_per_node_list": [1], "max_colocated_worker_groups": 0},
            "at least",
        ),
        ({"bundle_ct_per_node_list": [1], "deadline_s": 0}, "deadline_s"),
        (
            {"bundle_ct_per_node_list": [1], "placement_group_strategy": "SPRED"},
            "placement_group_strategy",
        ),
        (
            {"bundle_ct_per_node_list": [1], "bundle_resources": {"GPU": 1}},
            "names other than GPU",
        ),
        (
            {"bundle_ct_per_node_list": [1], "bundle_resources": {"CPU": -1}},
            "0 for CPU alone",
        ),
        (
            {"bundle_ct_per_node_list": [1], "bundle_resources": {"CPU": 0}},
            "another resource beside 0 CPU",
        ),
        (
            {"bundle_ct_per_node_list": [1], "bundle_resources": {"probe": 0}},
            "finite amounts of at least 0.0001",
        ),
        (
            {"bundle_ct_per_node_list": [1], "bundle_resources": {"probe": 1e-5}},
            "finite amounts of at least 0.0001",
        ),
        (
            {"bundle_ct_per_node_list": [1], "bundle_resources": {"CPU": math.inf}},
            "finite amounts of at least 0.0001",
        ),
        (
            {"bundle_ct_per_node_list": [9], "use_gpus": True},
            re.escape("num_gpus_per_node (8)"),
        ),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ConfigError, match=words):
        RayVirtualCluster(**arguments)


@pytest.mark.parametrize("arguments", [{"deadline_s": 0}])
def test_init_ray_wants_a_deadline(arguments):
    with pytest.raises(ConfigError, match="deadline_s"):
        init_ray(**arguments)


def test_ray_listens_on_loopback_only(ray_cluster):
    addresses = set()
    for process in psutil.Process().children(recursive=True):
        # An unused worker may exit meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses |= {
                connection.laddr.ip
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    assert addresses
    assert all(ip.removeprefix("::ffff:").startswith("127.") for ip in addresses)


def test_a_local_cluster_has_only_the_processes_that_it_needs(ray_cluster):
    commands = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            commands.append(" ".join(process.cmdline()))
    assert any("gcs_server" in command for command in commands)
    for script in ("monitor.py", "log_monitor.py", "dashboard.py"):
        assert not [command for command in commands if f"/{script}" in command]


def test_a_local_cluster_starts_no_workers_and_records_no_tasks(ray_cluster):
    [configs] = {
        argument.removeprefix("--config_list=")
        for process in psutil.Process().children(recursive=True)
        for argument in process.cmdline()
        if argument.startswith("--config_list=")
    }
    config = json.loads(base64.b64decode(configs))
    assert config["prestart_worker_first_driver"] is False
    assert config["task_events_report_interval_ms"] == 0


@pytest.mark.parametrize("log_monitor", [False, True])
def test_ray_starts_all_processes_outside_the_block(log_monitor):
    names = ("start_monitor", "start_api_server", "start_log_monitor")
    before = [vars(Node)[name] for name in names]
    with only_needed_processes(log_monitor=log_monitor):
        inside = [vars(Node)[name] for name in names]
    assert [vars(Node)[name] for name in names] == before
    same = [a is b for a, b in zip(inside, before, strict=True)]
    assert same == [False, False, log_monitor]


def test_second_start_is_without_effect(ray_cluster):
    assert init_ray(1) is False


def test_placement_and_release(ray_cluster):
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster:
        assert cluster.world_size() == 2
        assert cluster.node_count() == 2
        assert len(cluster.get_placement_groups()) == 2
        slots = [slot for row in cluster.slots() for slot in row]
        assert {slot.address for slot in slots} == {"127.0.0.1"}
    with pytest.raises(DistributedError, match="was shut down"):
        cluster.slots()
    assert cluster.shutdown()
    # The bundles are free again: the next cluster needs all of them.
    with RayVirtualCluster([2]) as cluster:
        assert not cluster.use_gpus
        assert len(cluster.slots()[0]) == 2


def test_unified_placement_group(ray_cluster):
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster:
        (group,) = cluster._init_placement_groups("PACK", use_unified_pg=True)
        assert group.bundle_count == 2


def test_the_form_of_placement_is_chosen_once(ray_cluster):
    with RayVirtualCluster([1, 1], use_gpus=False, unified=True) as cluster:
        assert [len(row) for row in cluster.slots()] == [2]
        cluster.place()
        cluster.place(unified=True)
        with pytest.raises(ConfigError, match=r"one over all nodes; call place"):
            cluster.place(unified=False)
        assert cluster.tied_bundles(2) == [(0, [0, 1])]
    with RayVirtualCluster([1, 1], use_gpus=False) as cluster:
        assert cluster.tied_bundles(1) == [(0, [0]), (1, [0])]
        with pytest.raises(ConfigError, match="one placement group for each node"):
            cluster.place(unified=True)
        with pytest.raises(ConfigError, match="must divide their number"):
            cluster.tied_bundles(2)


@pytest.mark.parametrize(
    ("counts", "use_gpus", "words"),
    [
        ([3], False, "needs 3 CPUs on one node; the cluster has 2 CPUs"),
        (
            [2, 1],
            False,
            r"needs 3 CPUs on 2 nodes \(2 CPUs, 1 CPUs\); the cluster has 2",
        ),
        ([1], True, "1 CPUs and 1 GPUs on one node"),
        (
            [8, 8],
            True,
            r"needs 16 CPUs and 16 GPUs on 2 nodes \(8 CPUs and 8 GPUs on each\); the "
            "cluster has 2 CPUs and 0 GPUs on 1 node",
        ),
    ],
)
def test_infeasible_clusters_are_refused_at_once(ray_cluster, counts, use_gpus, words):
    cluster = RayVirtualCluster(counts, use_gpus=use_gpus)
    with pytest.raises(ResourceInsufficientError, match=words):
        cluster.slots()


def test_busy_resources_end_in_a_deadline(ray_cluster):
    with (
        RayVirtualCluster([2]) as holder,
        RayVirtualCluster([1], name="late", deadline_s=0.3) as late,
    ):
        holder.slots()
        with pytest.raises(DeadlineExceededError, match=r"'late' waited 0.3 s"):
            late.slots()


def test_ports_are_unique(ray_cluster):
    with RayVirtualCluster([2]) as cluster:
        pairs = [cluster.get_master_address_and_port() for _ in range(10)]
        pairs += cluster.get_available_addresses_and_ports_batch([(0, 0), (0, 1)])
        assert len({port for _, port in pairs}) == 12
        assert {address for address, _ in pairs} == {"127.0.0.1"}
        with pytest.raises(
            ConfigError, match=r"no \(placement group, bundle\) \(0, 2\)"
        ):
            cluster.get_available_address_and_port(0, 2)


def test_a_signal_to_the_group_of_the_program_spares_its_cluster(ray_cluster):
    names = ("raylet", "gcs_server")
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() in names:
                found.append(process)
    assert len(found) == 2
    assert os.getpgid(0) not in {os.getpgid(process.pid) for process in found}


def test_room_for_groups_is_limited(ray_cluster):
    cluster = RayVirtualCluster([1], max_colocated_worker_groups=2)
    cluster.claim("a", [(0, 0)])
    cluster.claim("b", [(0, 0)])
    with pytest.raises(ResourceInsufficientError, match=r"\['a', 'b'\] are there"):
        cluster.claim("c", [(0, 0)])
    cluster.unclaim("a", [(0, 0)])
    cluster.claim("c", [(0, 0)])


def test_two_groups_share_a_bundle_where_nothing_is_said(ray_cluster):
    for use_gpus in (False, True):
        cluster = RayVirtualCluster([1], use_gpus=use_gpus)
        assert cluster.bundle.num_cpus == 1
        cluster.claim("a", [(0, 0)])
        cluster.claim("b", [(0, 0)])
        with pytest.raises(ResourceInsufficientError, match="are there"):
            cluster.claim("c", [(0, 0)])
        share = cluster.worker_share
        assert (share.num_cpus, share.num_gpus) == (0.5, 0.5 * use_gpus)


def test_worker_shares_fit_a_bundle(ray_cluster):
    for groups in range(1, 9):
        cluster = RayVirtualCluster([1], max_colocated_worker_groups=groups)
        assert cluster.worker_share.num_cpus * groups <= cluster.bundle.num_cpus


def test_from_config():
    config = ClusterConfig(
        num_nodes=2, workers_per_node=3, use_gpus=False, bundle_resources={"probe": 2}
    )
    cluster = RayVirtualCluster.from_config(config, name="c")
    assert cluster.bundle_counts == (3, 3)
    assert cluster.bundle.as_resources() == {"CPU": 1, "probe": 2}
    assert pickle.loads(pickle.dumps(config)) == config


def test_slow_start_is_tried_again_until_the_deadline(monkeypatch):
    attempts = []

    def never(**arguments):
        attempts.append(arguments["_node_ip_address"])
        raise Exception("The current node timed out during startup.")

    ticks = iter(range(0, 1000, 30))
    monkeypatch.setattr(ray_start, "_end_half_started", lambda before: None)
    monkeypatch.setattr(ray_start.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_start.ray, "init", never)
    monkeypatch.setattr(ray_start.time, "monotonic", lambda: float(next(ticks)))
    with pytest.raises(DistributedError, match=r"did not start.*timed out"):
        init_ray(1, address="local", deadline_s=60)
    assert attempts == ["127.0.0.1"] * 2


def test_attaching_to_nothing(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="nothing answers at the Ray address"):
        init_ray(address="127.0.0.1:1", deadline_s=2)
    with pytest.raises(ConfigError, match="host:port"):
        init_ray(address="nowhere")
    with pytest.raises(ConfigError, match=r"describe a new cluster.*'num_cpus': 2"):
        init_ray(2, address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="'object_store_bytes': 5}"):
        init_ray(address="127.0.0.1:1", object_store_bytes=5)
    with pytest.raises(ConfigError, match="num_cpus must be at least 1"):
        init_ray(0, address="local")
