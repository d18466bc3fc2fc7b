"""Groups that go on without a node, and grow when one comes."""

from __future__ import annotations

from typing import Any

import pytest
from rl_distributed_scripts import run_script

from rl_distributed import (
    ClusterConfig,
    ConfigError,
    FailFast,
    RayVirtualCluster,
    RestartGroup,
    RestartWorker,
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = run_script("elastic_nodes.py")
    return result


@pytest.mark.slow
class TestNodesToCome:
    def test_a_cluster_that_is_too_small_is_refused_unless_nodes_are_awaited(
        self, found: dict[str, Any]
    ) -> None:
        for name in ("refused", "waited"):
            kind, message = found[name]
            assert kind == "ResourceInsufficientError"
            assert "needs 2 CPUs on 2 nodes" in message
        assert found["waited"][1].endswith(
            "no further node came within 0.5 s (nodes_deadline_s)"
        )

    def test_ray_stays_asked_for_the_bundles_of_nodes_to_come(
        self, found: dict[str, Any]
    ) -> None:
        # What its autoscaler goes by; ranks on nodes that are there come first.
        assert found["asked_for"] == ["CREATED", "PENDING"]
        assert found["slots"] == [[True], [False]]

    def test_a_group_that_may_not_shrink_needs_all(self, found: dict[str, Any]) -> None:
        kind, message = found["rigid"]
        assert kind == "ResourceInsufficientError"
        assert "needs 2 workers, and cluster 'grows' has a node for 1 of 2" in message

    def test_the_others_are_called_and_the_one_to_come_is_named(
        self, found: dict[str, Any]
    ) -> None:
        assert found["live_at_start"] == [0]
        assert found["call_one"] == ["ok", 0]
        kind, message = found["call_all"]
        assert kind == "WorkerDiedError"
        assert "worker 1 of group 'group'" in message
        assert "no node has had room for it so far" in message
        assert found["pool_at_start"] == 1

    def test_it_is_started_when_its_node_comes(self, found: dict[str, Any]) -> None:
        assert found["grown"]
        assert found["group_grown"]
        # A first start is no restart.
        assert found["restarts"] == [0, 0]


@pytest.mark.slow
class TestLostNodes:
    def test_the_others_go_on(self, found: dict[str, Any]) -> None:
        assert found["shrunk"]
        assert found["near_call"] == ["ok", 0]
        kind, message = found["far_call"]
        assert kind == "WorkerDiedError"
        assert "node lost: " in message
        assert found["pool_shrunk"] == 1
        assert found["without"] == [1]

    def test_they_grow_again_when_another_node_comes(
        self, found: dict[str, Any]
    ) -> None:
        assert found["group_back"]
        assert found["pool_back"]
        assert found["replaced"]

    def test_fail_does_not_wait(self, found: dict[str, Any]) -> None:
        kind, message = found["fail"]
        assert kind == "WorkerDiedError"
        assert "no node had room for them now, and on_node_lost is 'fail'" in message

    def test_too_few_wait_for_a_node_and_then_fail(self, found: dict[str, Any]) -> None:
        kind, message = found["few"]
        assert kind == "WorkerDiedError"
        assert (
            "within 1 s (resources_deadline_s) while fewer than 2 were up (min_workers)"
        ) in message


class TestSettings:
    def test_policies_are_checked(self) -> None:
        with pytest.raises(ConfigError, match=r"'wait', 'shrink' or 'fail': got 'go'"):
            FailFast(on_node_lost="go")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"min_workers must be at least 1: got 0"):
            RestartWorker(on_node_lost="shrink", min_workers=0)
        with pytest.raises(ConfigError, match=r"got RestartGroup, which restarts all"):
            RestartGroup(on_node_lost="shrink")

    def test_clusters_are_checked(self) -> None:
        with pytest.raises(ConfigError, match=r"between 1 and the 2 nodes .* got 3"):
            ClusterConfig(num_nodes=2, min_nodes=3)
        with pytest.raises(ConfigError, match=r"got unified=true, with which Ray"):
            ClusterConfig(num_nodes=2, min_nodes=1, unified=True)
        with pytest.raises(ConfigError, match=r"same number of bundles .* \[1, 2\]"):
            RayVirtualCluster([1, 2]).place(min_nodes=1)
        with pytest.raises(ConfigError, match=r"nodes_deadline_s must not be negative"):
            RayVirtualCluster([1]).place(nodes_deadline_s=-1.0)
