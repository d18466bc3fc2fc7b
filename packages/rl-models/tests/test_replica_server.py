"""Calls of several threads on the same replicas, which are plain objects here."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl_distributed.errors import WorkerDiedError
from rl_models.errors import GenerationError
from rl_models.replicas.load import ReplicaLoad
from rl_models.replicas.row_queue import serve_parts
from rl_models.replicas.server import ReplicaServer

DEADLINE_S = 30.0


class Replicas:
    """Replicas whose calls end when `ends` says so."""

    def __init__(self, count, serving=None):
        self.num_replicas = count
        self.serving = list(range(count)) if serving is None else serving
        self.load = ReplicaLoad(count)
        self.changed = threading.Condition()
        self.num_begun = 0
        self.ends = threading.Event()
        self.dies = False

    def call(self, method, replica, **kwargs):
        if self.dies:
            raise WorkerDiedError(f"replica {replica} died")
        with self.changed:
            self.num_begun += 1
            self.changed.notify_all()
        return Ticket(replica)

    def finished(self, tickets, timeout_s):
        assert self.ends.wait(DEADLINE_S)
        return list(tickets)

    def results(self, ticket, timeout_s):
        return [f"rows of {ticket.replica}"]

    def lose(self, replica, cause):
        self.serving.remove(replica)

    def wait_for_one(self):
        if not self.serving:
            raise GenerationError("No generation replica is left")
        return self.serving

    def serve(self, parts, calls_at_once=1):
        server = ReplicaServer(
            self,
            self,
            self.load,
            [{}] * parts,
            calls_at_once=calls_at_once,
            deadline_s=DEADLINE_S,
            restore=lambda: None,
        )
        return serve_parts(parts, server)


class Ticket:
    """A call of a replica."""

    def __init__(self, replica):
        self.replica = replica


def test_calls_of_several_threads_spread_over_the_replicas():
    replicas = Replicas(8)
    with ThreadPoolExecutor(24) as threads:
        calls = [threads.submit(replicas.serve, 1) for _ in range(24)]
        with replicas.changed:
            assert replicas.changed.wait_for(
                lambda: replicas.num_begun == 24, DEADLINE_S
            )
        assert replicas.load.counts == [3] * 8
        replicas.ends.set()
        answers = Counter(answer for call in calls for answer in call.result())
    assert answers == {f"rows of {replica}": 3 for replica in range(8)}
    assert replicas.load.counts == [0] * 8


def test_a_call_begins_where_others_have_the_least():
    replicas = Replicas(4, serving=[0, 2, 3])
    for replica, count in ((0, 2), (3, 1)):
        for _ in range(count):
            assert replicas.load.take(np.arange(4) == replica) == replica
    replicas.ends.set()
    assert replicas.serve(3) == ["rows of 2", "rows of 3", "rows of 0"]
    assert replicas.load.counts == [2, 0, 0, 1]


def test_nothing_stays_counted_after_a_call_that_failed():
    replicas = Replicas(3)
    replicas.dies = True
    with pytest.raises(GenerationError, match="replicas were lost"):
        replicas.serve(2)
    assert replicas.load.counts == [0] * 3
    replicas = Replicas(3)
    replicas.ends.set()
    replicas.results = lambda ticket, timeout_s: {}["nothing"]
    with pytest.raises(KeyError, match="nothing"):
        replicas.serve(6, calls_at_once=2)
    assert replicas.load.counts == [0] * 3


def test_no_replica_is_taken_where_none_is_open():
    load = ReplicaLoad(3)
    assert load.take(np.zeros(3, np.bool_)) is None
    taken = [load.take(np.array([True, False, True])) for _ in range(4)]
    assert taken == [0, 2, 0, 2]
