"""The fleet with scripted processes: replaced, dropped, updated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_distributed.errors import ConfigError, WorkerDiedError, WorkerStartError
from rl_models.serving.fleet import Fleet
from rl_models.serving.folder_weights import FolderWeights

DEADLINE_S = 60.0
WEIGHTS = FolderWeights("folder", ())
OTHER = FolderWeights("other", ())


class FakeProcess:
    def __init__(self, number: int, name: str, plan: dict[str, Any]) -> None:
        self.number, self.name, self.plan = number, name, plan
        self.loaded: list[tuple[str, int]] = []
        self.stopped: list[bool] = []
        self.pid: int | None = None

    def start(self) -> str:
        if self.name in self.plan.get("broken", ()):
            raise WorkerStartError(f"{self.name} does not start")
        return f"http://{self.name}"

    def load_weights(self, weights: FolderWeights, version: int) -> str:
        if self.name in self.plan.get("dead", ()):
            raise WorkerDiedError(f"{self.name} is gone")
        if self.name in self.plan.get("bad", ()):
            return "a tensor differs"
        self.loaded.append((weights.folder, version))
        return ""

    def stop(self, *, at_once: bool) -> None:
        self.stopped.append(at_once)


class Watched:
    """A fleet with events that can be awaited."""

    def __init__(self, num_replicas: int, max_restarts: int = 3, **plan: Any) -> None:
        self.plan = plan
        self.processes: dict[str, FakeProcess] = {}
        self.events: list[str] = []
        self.changed = threading.Condition()
        self.fleet = Fleet(
            self._launch,
            num_replicas,
            on_up=lambda number, url: self._note(f"up {number} {url[7:]}"),
            on_down=lambda number, url: self._note(f"down {number} {url[7:]}"),
            on_hopeless=lambda: self._note("hopeless"),
            max_restarts=max_restarts,
        )

    def _launch(self, number: int) -> FakeProcess:
        with self.changed:
            count = sum(p.number == number for p in self.processes.values())
            name = f"{number}{'abcdef'[count]}"
            self.processes[name] = FakeProcess(number, name, self.plan)
            return self.processes[name]

    def _note(self, event: str) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, event: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: event in self.events, DEADLINE_S), (
                f"{event} did not come: {self.events}"
            )

    def states(self) -> list[tuple[str, int]]:
        rows = self.fleet.status()["replicas"]
        return [(row["state"], row["weight_version"]) for row in rows]


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(*arguments: Any, **plan: Any) -> Watched:
        made.append(Watched(*arguments, **plan))
        return made[-1]

    yield make
    for watched in made:
        watched.fleet.stop()


def test_a_process_that_is_lost_is_replaced(watch: Callable[..., Watched]) -> None:
    watched = watch(2)
    watched.fleet.start(DEADLINE_S)
    assert watched.states() == [("up", 0), ("up", 0)]
    watched.fleet.report_lost(1, "http://1a", "killed")
    watched.wait("up 1 1b")
    assert watched.events.index("down 1 1a") < watched.events.index("up 1 1b")
    assert watched.processes["1a"].stopped == [True]
    # A late report of the same loss kills nothing.
    watched.fleet.report_lost(1, "http://1a", "killed")
    assert watched.states() == [("up", 0), ("up", 0)]
    row = watched.fleet.status()["replicas"][1]
    assert (row["restarts"], row["problem"]) == (1, "killed")
    watched.fleet.stop()
    assert watched.processes["0a"].stopped == [False]


def test_one_that_is_lost_too_often_is_dropped(watch: Callable[..., Watched]) -> None:
    watched = watch(2, 1)
    watched.fleet.start(DEADLINE_S)
    watched.fleet.report_lost(0, "http://0a", "killed")
    watched.wait("up 0 0b")
    watched.fleet.report_lost(0, "http://0b", "killed")
    watched.wait("down 0 0b")
    watched.fleet.report_lost(1, "http://1a", "killed")
    watched.wait("up 1 1b")
    watched.fleet.report_lost(1, "http://1b", "killed")
    watched.wait("hopeless")
    assert [state for state, _ in watched.states()] == ["dropped", "dropped"]


def test_a_start_that_fails_is_an_error_and_ends_all(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(2, broken=["1a"])
    with pytest.raises(WorkerStartError, match="1a does not start"):
        watched.fleet.start(DEADLINE_S)
    assert watched.processes["1a"].stopped
    assert watched.processes["0a"].stopped


def test_a_replacement_that_fails_is_tried_again(watch: Callable[..., Watched]) -> None:
    watched = watch(1, broken=["0b"])
    watched.fleet.start(DEADLINE_S)
    watched.fleet.report_lost(0, "http://0a", "killed")
    watched.wait("up 0 0c")
    assert watched.fleet.status()["replicas"][0]["restarts"] == 2


def test_weights_reach_all_and_later_replacements(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(2)
    watched.fleet.start(DEADLINE_S)
    report = watched.fleet.update_weights(WEIGHTS)
    assert (report.version, report.problems, report.num_updated) == (1, {}, 2)
    assert watched.fleet.update_weights(OTHER, 7).version == 7
    watched.fleet.report_lost(0, "http://0a", "killed")
    watched.wait("up 0 0b")
    assert watched.processes["0b"].loaded == [("other", 7)]
    assert watched.states() == [("up", 7), ("up", 7)]
    with pytest.raises(ConfigError, match="above the present one, 7: got 7"):
        watched.fleet.update_weights(WEIGHTS, 7)
    assert watched.fleet.version == 7


@pytest.mark.parametrize("how", ["bad", "dead"])
def test_a_replica_that_fails_an_update_is_replaced(
    watch: Callable[..., Watched], how: str
) -> None:
    watched = watch(2, **{how: ["1a"]})
    watched.fleet.start(DEADLINE_S)
    report = watched.fleet.update_weights(WEIGHTS, 2)
    assert (sorted(report.problems), report.num_updated) == ([1], 1)
    watched.wait("down 1 1a")
    watched.wait("up 1 1b")
    assert watched.processes["1b"].loaded == [("folder", 2)]
    assert watched.states() == [("up", 2), ("up", 2)]


def test_where_all_fail_the_weights_before_come_back(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(1, bad=["0b"])
    watched.fleet.start(DEADLINE_S)
    watched.fleet.update_weights(WEIGHTS, 2)
    watched.fleet.report_lost(0, "http://0a", "killed")
    # The replacement cannot load them either; the next one can.
    watched.wait("up 0 0c")
    assert watched.processes["0c"].loaded == [("folder", 2)]
    watched.plan["bad"].append("0c")
    report = watched.fleet.update_weights(OTHER, 3)
    assert report.num_updated == 0
    watched.wait("up 0 0d")
    assert watched.processes["0d"].loaded == [("folder", 2)]
    assert watched.fleet.version == 2
