"""Whole runs on hosts that share nothing but a network, which is cut and lost."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matrix_cells import cells
from small_run import long_grpo, write_recipe
from two_hosts import HEAD, QUICK, Host, Hosts, hosts, why_impossible
from two_hosts_run import HostRun, final_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 6
RUN_S = 300.0
# Until a loss is noticed, on a busy machine; 10 s on an idle one.
NOTICED_S = 60.0
# What misses the host first: the ranks that train, or the replica that samples.
WAITS = r"training waits up to 300 s|no node has room .* waiting up to 300 s"
LOSSES: dict[str, Callable[[Host], None]] = {"cut": Host.cut, "kill": Host.lose}
"""How a host is lost: it answers nothing any more, or all its processes are killed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    """A cluster that tests add hosts to, with its head."""
    if reason := why_impossible():
        pytest.skip(reason)
    with hosts(QUICK) as made:
        made.head = made.add(trainer=1)
        yield made


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def stage_of(run: Any) -> Path:
    return Path(run.json["run_dir"]) / "stages" / "grpo"


def far_recipe(folder: Path, **fault_tolerance: Any) -> str:
    """Write a recipe all of whose workers are on the host with the resource `far`."""
    data = long_grpo(max_num_steps=NUM_STEPS)
    data["common"]["cluster"] |= {"bundle_resources": {"far": 1}}
    data["common"]["fault_tolerance"] = fault_tolerance
    limit = fault_tolerance.get("node_deadline_s", 300)
    data["common"]["policy"]["generation"]["node_deadline_s"] = limit
    return write_recipe(folder, data)


def apart_recipe(folder: Path, transport: str) -> str:
    """Write a recipe that trains on one host and samples on another."""
    data = long_grpo(max_num_steps=NUM_STEPS)
    data["common"]["cluster"] |= {"bundle_resources": {"trainer": 1}}
    sampling = data["common"]["policy"]["generation"]
    sampling["weight_sync"] = {"transport": transport}
    apart = {"bundle_resources": {"sampler": 1}}
    data["stages"]["grpo"]["generation_cluster"] = apart
    return write_recipe(folder, data)


@pytest.mark.parametrize(
    "transport", cells(["collective", "object_store"], ["collective"])
)
def test_weights_pass_between_hosts_and_a_short_cut_changes_nothing(
    transport: str, cluster: Hosts, whole_run: Any, tmp_path: Path
) -> None:
    one_host = stage_of(whole_run)
    far = cluster.add(sampler=1)
    before = cluster.head.sent_bytes()
    run = HostRun.train(cluster.head, apart_recipe(tmp_path, transport))
    stage = run.stage
    run.wait_for_step(2)
    far.cut()
    pause(5)
    assert not run.is_over, run.console
    far.restore()
    assert run.end(RUN_S) == 0, run.console

    assert final_weights(stage, NUM_STEPS) == final_weights(one_host, NUM_STEPS)
    # The digests of all versions, as the replica has confirmed them.
    versions = (stage / "weight_versions.jsonl").read_text()
    assert versions == (one_host / "weight_versions.jsonl").read_text()
    size = sum(map(len, final_weights(stage, NUM_STEPS).values()))
    assert cluster.head.sent_bytes() - before > len(versions.splitlines()) * size
    far.lose()


@pytest.mark.parametrize("how", cells(LOSSES, ["cut"]))
def test_a_new_host_takes_the_place_of_a_lost_one(
    how: str, cluster: Hosts, whole_run: Any, tmp_path: Path
) -> None:
    far = cluster.add(far=1)
    run = HostRun.train(cluster.head, far_recipe(tmp_path))
    run.wait_for_checkpoint()
    LOSSES[how](far)
    run.wait_for(WAITS)
    lost = f"(node {far.address}, pid "
    assert any(lost in record["message"] for record in run.log())
    new = cluster.add(far=1)
    assert run.end(RUN_S) == 0, run.console

    for name in ("policy-0", "generation-0"):
        places = [record["node"] for record in run.log(f"run-{name}")]
        assert list(dict.fromkeys(places)) == [far.address, new.address]
    found = final_weights(run.stage, NUM_STEPS)
    assert found == final_weights(stage_of(whole_run), NUM_STEPS)
    far.lose()
    new.lose()


@pytest.mark.parametrize(
    ("how", "on_node_lost"),
    cells(
        [(how, rule) for how in LOSSES for rule in ("fail", "wait")], [("kill", "fail")]
    ),
)
def test_a_run_ends_with_the_name_of_the_lost_host(
    how: str, on_node_lost: str, cluster: Hosts, tmp_path: Path
) -> None:
    far = cluster.add(far=1)
    recipe = far_recipe(tmp_path, on_node_lost=on_node_lost, node_deadline_s=5)
    run = HostRun.train(cluster.head, recipe)
    run.wait_for_checkpoint()
    LOSSES[how](far)
    began = time.monotonic()
    assert run.end(2 * NOTICED_S) == 1, run.console
    assert time.monotonic() - began < NOTICED_S, run.console

    error = run.console[run.console.index("Error: ") :]
    assert far.address in error
    assert "node lost: " in error
    command = next(line for line in error.splitlines() if "Continue with: " in line)
    words = shlex.split(command.partition("Continue with: ")[2])
    assert words == ["rl", "train", recipe, "--resume", str(tmp_path / "out")]
    far.lose()


@pytest.mark.matrix
def test_ranks_on_two_hosts_outlast_short_cuts(cluster: Hosts, tmp_path: Path) -> None:
    data = long_grpo(max_num_steps=NUM_STEPS)
    data["common"]["cluster"] |= {"num_nodes": 2}
    data["common"]["env"]["num_cpus"] = 0
    recipes = []
    for name in ("apart", "together"):
        (tmp_path / name).mkdir()
        recipes.append(write_recipe(tmp_path / name, data))
    far = cluster.add()
    run = HostRun.train(cluster.head, recipes[0])
    for step in (1, 3):
        run.wait_for_step(step)
        far.cut()
        pause(5)
        far.restore()
    assert run.end(RUN_S) == 0, run.console
    assert [len(run.log(f"run-policy-{rank}")) > 0 for rank in (0, 1)] == [True, True]
    far.lose()

    # The same two ranks and replicas, on one host.
    with hosts(QUICK) as alone:
        expected = HostRun.train(alone.add(num_cpus=2), recipes[1])
        assert expected.end(RUN_S) == 0, expected.console
    found = final_weights(run.stage, NUM_STEPS)
    assert found == final_weights(expected.stage, NUM_STEPS)


@pytest.mark.matrix
def test_a_run_goes_back_to_a_host_that_was_cut_off_for_long(
    whole_run: Any, tmp_path: Path
) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    # Longer than this program waits for a host, and shorter than Ray does.
    with hosts() as made:
        head, far = made.add(), made.add(far=1)
        run = HostRun.train(head, far_recipe(tmp_path))
        run.wait_for_checkpoint()
        far.cut()
        run.wait_for(WAITS)
        far.restore()
        assert run.end(RUN_S) == 0, run.console
        places = {record["pid"] for record in run.log("run-policy-0")}
        assert len(places) == 2
    found = final_weights(run.stage, NUM_STEPS)
    assert found == final_weights(stage_of(whole_run), NUM_STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("how", LOSSES)
def test_a_run_grows_to_a_host_that_joins_and_goes_on_without_it(
    how: str, cluster: Hosts, tmp_path: Path
) -> None:
    data = long_grpo(max_num_steps=4000)
    data["common"]["cluster"] |= {"num_nodes": 2, "min_nodes": 1}
    data["common"]["env"]["num_cpus"] = 0
    data["common"]["fault_tolerance"] = {"on_node_lost": "shrink"}
    run = HostRun.train(cluster.head, write_recipe(tmp_path, data))
    run.wait_for("training goes on with 1 of 2 ranks")
    run.wait_for_checkpoint()
    far = cluster.add()
    run.wait_for("nodes have come: more workers train from here on")
    run.wait_for("generation replica 1 is back")
    places = {record["node"] for record in run.log("run-policy-1")}
    assert places == {far.address} != {HEAD}
    run.wait_for_step(run.step + 3)
    LOSSES[how](far)
    run.wait_for("training goes on with 1 of 2 ranks", count=2)
    run.wait_for_step(run.step + 3)
    run.interrupt()
    assert run.end(RUN_S) == 130, run.console
    assert "the run is saved in" in run.console
    far.lose()
