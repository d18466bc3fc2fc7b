"""Replicas whose node is lost or still to come; their workers are stand-ins."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rl_distributed.errors import ConfigError, WorkerDiedError
from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.replicas.replicas import Replicas

DEADLINE_S = 20.0


class Workers:
    """Replicas of one worker; the test says which have a node."""

    def __init__(self, *unplaced: int, num_replicas: int = 2) -> None:
        self.num_replicas = num_replicas
        self.lacking = set(unplaced)
        self.unplaced = list(unplaced)
        self.has_room = threading.Event()
        self.never_comes = False
        self.fails_once = False
        self.num_starts = 0

    def lacks_node(self, replica: int) -> bool:
        return replica in self.lacking

    def wait_for_nodes(self, replica: int) -> None:
        if self.never_comes:
            raise WorkerDiedError("no node had room")
        assert self.has_room.wait(DEADLINE_S)
        self.lacking.discard(replica)

    def restart(self, replica: int, cause: str) -> None:
        del cause
        self.num_starts += 1
        if self.fails_once:
            self.fails_once = False
            self.lacking.add(replica)
            raise WorkerDiedError("its node was lost as well")

    def end(self, replica: int, cause: str) -> None:
        del replica, cause


def replicas_of(workers: Workers) -> Replicas:
    stands: Any = workers
    replicas = Replicas(stands, lambda _: True, max_restarts=3, deadline_s=DEADLINE_S)
    replicas.start_unplaced()
    return replicas


def wait_until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.01)


def test_the_others_serve_until_its_node_comes() -> None:
    workers = Workers(1)
    replicas = replicas_of(workers)
    # An update does not wait for the one to come.
    assert replicas.settle() == [0]
    assert (replicas.serving, replicas.num_away) == ([0], 1)
    workers.has_room.set()
    wait_until(lambda: replicas.live == [0, 1])
    assert replicas.num_away == 0


def test_a_lost_node_and_another_one_lost_as_it_starts() -> None:
    workers = Workers()
    replicas = replicas_of(workers)
    workers.has_room.set()
    workers.lacking, workers.fails_once = {0}, True
    replicas.lose(0, WorkerDiedError("node lost"))
    wait_until(lambda: replicas.live == [0, 1])
    assert workers.num_starts == 2


def test_a_node_that_never_comes() -> None:
    workers = Workers()
    replicas = replicas_of(workers)
    workers.lacking, workers.never_comes = {0, 1}, True
    replicas.lose(0, WorkerDiedError("node lost"))
    replicas.lose(1, WorkerDiedError("node lost"))
    with pytest.raises(GenerationError, match="no node had room"):
        replicas.settle()
    assert (replicas.live, workers.num_starts) == ([], 0)


def test_callers_wait_for_a_node_where_no_other_replica_is_left() -> None:
    workers = Workers(0, 1)
    replicas = replicas_of(workers)
    threading.Timer(0.2, workers.has_room.set).start()
    assert replicas.wait_for_one()
    wait_until(lambda: replicas.settle() == [0, 1])


def test_one_that_is_wanted_no_longer_is_not_started() -> None:
    workers = Workers(1)
    replicas = replicas_of(workers)
    replicas.resize(1)
    workers.has_room.set()
    wait_until(lambda: not workers.lacking)
    replicas.close()
    assert (replicas.live, workers.num_starts) == ([0], 0)


def test_those_that_wait_for_a_node_are_among_the_wanted_ones() -> None:
    workers = Workers(2, 3, num_replicas=4)
    replicas = replicas_of(workers)
    for _ in range(2):
        replicas.resize(3)
        assert (replicas.live, replicas.num_away) == ([0, 1], 2)
    workers.has_room.set()
    wait_until(lambda: replicas.live == [0, 1, 2])
    wait_until(lambda: not workers.lacking)
    assert (replicas.num_away, workers.num_starts) == (1, 1)
    replicas.resize(4)
    assert (replicas.live, replicas.num_away) == ([0, 1, 2, 3], 0)


def test_one_whose_node_never_comes_counts_once() -> None:
    workers = Workers(1)
    waits, is_over = threading.Event(), threading.Event()

    def wait_for_nodes(replica: int) -> None:
        del replica
        waits.set()
        assert is_over.wait(DEADLINE_S)
        raise WorkerDiedError("no node had room")

    stands: Any = workers
    stands.wait_for_nodes = wait_for_nodes
    before = set(threading.enumerate())
    replicas = replicas_of(workers)
    assert waits.wait(DEADLINE_S)
    (waiting,) = set(threading.enumerate()) - before
    replicas.resize(1)
    is_over.set()
    waiting.join(DEADLINE_S)
    assert (replicas.live, replicas.num_away) == ([0], 1)


def test_a_new_budget_of_restarts_replaces_the_one_before() -> None:
    workers = Workers()
    replicas = replicas_of(workers)
    replicas.renew(0)
    replicas.lose(0, WorkerDiedError("killed"))
    assert (replicas.settle(), replicas.num_away) == ([1], 1)
    replicas.renew(1)
    replicas.lose(1, WorkerDiedError("killed"))
    wait_until(lambda: replicas.live == [1])
    assert workers.num_starts == 1


def test_the_least_number_fits_the_number_of_replicas() -> None:
    with pytest.raises(ConfigError, match=r"num_replicas \(2\): got 3"):
        GenerationConfig(max_new_tokens=4, num_replicas=2, min_replicas=3)
