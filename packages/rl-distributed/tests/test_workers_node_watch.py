from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from rl_distributed_scripts import run_script

from rl_distributed.errors import ConfigError
from rl_distributed.workers import FailFast, node_watch
from rl_distributed.workers.node_watch import NodeWatch, reached

DEADLINE_S = 60.0
# Time within which something must not happen.
QUIET_S = 1.5


class Server:
    """Stands in for the Ray process of a node."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.listener.settimeout(DEADLINE_S)
        self.place = self.listener.getsockname()[:2]

    def accept(self) -> socket.socket:
        link, _ = self.listener.accept()
        return link


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.listener.close()


@contextlib.contextmanager
def watching(limit_s: float, **nodes: tuple[str, int]) -> Iterator[queue.Queue]:
    """Yields the watch's notifications as (node, cause)."""
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    watch = NodeWatch("test", limit_s, lambda node, cause: told.put((node, cause)))
    told.watch = watch  # type: ignore[attr-defined]
    watch.watch(nodes)
    try:
        yield told
    finally:
        watch.close()
        watch.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "nodes-test" not in names


def test_the_end_of_a_process_is_told_at_once(server: Server) -> None:
    with watching(1_000.0, far=server.place) as told:
        link = server.accept()
        link.sendall(b"settings")
        server.listener.close()
        link.close()
        node, cause = told.get(timeout=DEADLINE_S)
    assert node == "far"
    assert cause == f"nothing of Ray is left at 127.0.0.1:{server.place[1]}"


def test_a_server_that_closes_idle_connections_is_not_lost(server: Server) -> None:
    with watching(1_000.0, far=server.place) as told:
        for _ in range(4):
            server.accept().close()
        link = server.accept()
        with pytest.raises(queue.Empty):
            told.get(timeout=QUIET_S)
        link.close()


def test_a_node_that_answers_nothing_any_more_is_lost_at_the_limit(
    server: Server,
) -> None:
    with watching(2.0, far=server.place) as told, contextlib.ExitStack() as stack:
        link = server.accept()
        # With no one accepting them, further connections get no answer at all.
        for _ in range(2):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.connect(server.place)
        began = time.monotonic()
        link.close()
        node, cause = told.get(timeout=DEADLINE_S)
        assert time.monotonic() - began >= 1.0
    assert node == "far"
    assert cause.endswith("has not answered for 2 s")


def test_a_node_that_was_never_reached_is_not_lost() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with (
            watching(1.0, far=bound.getsockname()) as told,
            pytest.raises(queue.Empty),
        ):
            told.get(timeout=QUIET_S)


def test_nodes_that_are_watched_no_longer(server: Server) -> None:
    with watching(1_000.0, far=server.place) as told:
        link = server.accept()
        told.watch.watch({})  # type: ignore[attr-defined]
        # The watch hangs up.
        link.settimeout(DEADLINE_S)
        assert link.recv(10) == b""
        server.listener.close()
        link.close()
        with pytest.raises(queue.Empty):
            told.get(timeout=QUIET_S)


def test_nothing_runs_without_nodes() -> None:
    with watching(10.0):
        assert "nodes-test" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("name", ["node_limit_s", "resources_deadline_s"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be positive: got 0"):
        FailFast(**{name: 0.0})


@pytest.mark.slow
def test_a_group_outlives_the_loss_of_a_node() -> None:
    found = run_script("lost_node.py")
    rank = found["rank"]
    kind, message, failed = found["first"]
    assert (kind, failed) == ("WorkerDiedError", rank)
    assert f"worker {rank} of group 'far'" in message
    # On a slow machine Ray itself may notice first, with its own message.
    assert "node lost: " in message
    assert found["dead"] == "dead"
    assert found["old_is_gone"]
    for kind, message, failed in found["without_room"]:
        assert (kind, failed) == ("WorkerDiedError", rank)
        assert f"cannot start worker(s) [{rank}] again: no node had room" in message
        assert "within 2 s (resources_deadline_s); add a node" in message
        assert "node lost: nothing of Ray is left" in message
    # Waiting did not use up the one allowed restart.
    assert found["with_room"] == ["ok", found["pids"]]
    assert found["restarts"] == [int(rank == 0), int(rank == 1)]
    assert found["new_nodes"] == 1


def test_only_nodes_that_take_a_connection_are_reached(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Server()
    closed.listener.close()
    places = {"up": server.place, "down": closed.place}
    monkeypatch.setattr(node_watch, "places_of", lambda _: places)
    assert reached(places) == {"up"}
    monkeypatch.setattr(node_watch, "places_of", lambda _: {})
    assert reached(places) == set()


def test_all_nodes_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {str(i): ("192.0.2.1", i) for i in range(8)}
    # Passed only when all of them are tried.
    together = threading.Barrier(len(places), timeout=DEADLINE_S)

    def tried(place: tuple[str, int]) -> bool:
        together.wait()
        return place[1] > 0

    monkeypatch.setattr(node_watch, "places_of", lambda _: places)
    monkeypatch.setattr(node_watch, "_takes_connection", tried)
    assert reached(places) == set(places) - {"0"}
