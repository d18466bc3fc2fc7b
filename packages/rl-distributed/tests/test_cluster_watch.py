from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import psutil
import pytest
from matrix_cells import cells
from rl_distributed_scripts import (
    SCRIPTS,
    clean_environment,
    end_session,
    ray_folder,
    run_script,
    run_to_end,
)

from rl_distributed.cluster import watch as cluster_watch
from rl_distributed.cluster.watch import ClusterWatch, find_loss
from rl_distributed.failures.cluster_loss import ClusterLoss

DEADLINE_S = 60.0
# Ray then gives up sooner, and waits less for results.
SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "40"}


def check_told(found: dict, name: str, how: str, *, knows_pid: bool = True) -> None:
    assert found["process"] == name
    assert found["pid"] == (found["killed"] if knows_pid else None)
    pid = f", pid {found['killed']}" if knows_pid else ""
    for text in (found["loss"], found["error"], found["restart"]):
        assert text.startswith("the Ray cluster is lost: ")
        assert f"({name}{pid}, cluster " in text
        assert how in text
    assert found["left"] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_head_of_a_started_cluster_is_killed() -> None:
    found = run_script("lost_cluster.py", "gcs_server", **SOON)
    check_told(found, "gcs_server", "was ended by SIGKILL. Workers that run still")
    assert "Ray ends this program 40 s after that" in found["loss"]
    assert found["answers"] == [5, 5]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_node_process_of_a_started_cluster_is_killed() -> None:
    found = run_script("lost_cluster.py", "raylet")
    check_told(found, "raylet", "was ended by SIGKILL. These workers cannot be")


@contextlib.contextmanager
def running_head():
    """A cluster started by `ray start`; yields its variables and its address."""
    with socket.socket() as free, ray_folder() as folder:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 32}
        program = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
        options = [
            *("--node-ip-address=127.0.0.1", f"--port={place.split(':')[1]}"),
            *("--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"),
            f"--temp-dir={folder}",
        ]
        process = subprocess.Popen(
            [*program, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean_environment(**token),
            start_new_session=True,
        )
        try:
            assert process.wait(3 * DEADLINE_S) == 0
            yield process, place, token
        finally:
            end_session(process)


def pid_in_session(leader: subprocess.Popen, name: str) -> int:
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if other.name() == name and os.getsid(other.pid) == leader.pid:
                return other.pid
    raise AssertionError(f"there is no {name}")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", cells(["gcs_server", "raylet"], ["raylet"]))
def test_a_process_of_a_joined_cluster_is_killed(name: str) -> None:
    with running_head() as (leader, place, token):
        pid = str(pid_in_session(leader, name))
        found = run_script("lost_cluster.py", name, place, pid, **{**token, **SOON})
    how = "has ended" if name == "raylet" else "takes no connection any more"
    check_told(found, name, how, knows_pid=name == "raylet")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_error_that_ends_the_program_is_shown_without_the_head() -> None:
    command = [sys.executable, str(SCRIPTS / "lost_cluster.py")]
    with ray_folder() as folder:
        code, _, err = run_to_end(
            [*command, "gcs_server", "uncaught"],
            clean_environment(RAY_TMPDIR=folder),
            240.0,
        )
    assert code == 1
    assert "ClusterLostError: the Ray cluster is lost: " in err


def test_nothing_is_lost_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_watch.ray_worker, "_global_node", None)
    assert find_loss() is None


def test_a_watch_ends_in_its_own_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = ClusterLoss("raylet", 7, "h:1", "has ended", 0.0)
    monkeypatch.setattr(cluster_watch, "find_loss", lambda: loss)
    told: list[ClusterLoss] = []

    def note(found: ClusterLoss) -> None:
        told.append(found)
        watch.close()

    watch = ClusterWatch(note)
    watch._thread.join(DEADLINE_S)
    assert not watch._thread.is_alive()
    assert told == [loss]


def head_end(head: cluster_watch._Head, tries: int) -> list[str]:
    """Return the results of this many attempts, one right after the other."""
    told = []
    for _ in range(tries):
        head._next = 0.0
        told.append(head.end())
    return told


def test_a_head_is_lost_after_three_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        head = cluster_watch._Head(f"127.0.0.1:{port}")
        assert head_end(head, 4) == [""] * 4
        # Between two attempts no query is sent.
        assert head.end() == ""
    first, second, third = head_end(head, 3)
    assert (first, second) == ("", "")
    assert third.startswith("takes no connection any more (")
    with socket.create_server(("127.0.0.1", port)):
        assert head_end(head, 1) == [""]
    # Only consecutive refusals count.
    assert head_end(head, 2) == ["", ""]


def test_a_head_that_may_come_back_is_given_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        head = cluster_watch._Head(f"127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        assert head_end(head, 5) == [""] * 5
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "nonsense")
        assert head_end(head, 1)[0].startswith("takes no connection")
