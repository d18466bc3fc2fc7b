from __future__ import annotations

from collections import Counter

import pytest

from rl_models.errors import GenerationError
from rl_models.policy.row_sharding import num_parts
from rl_models.replicas.row_queue import ReplicaLostError, serve_parts


class Fake:
    """Replicas that work in turns: `costs` is the number of turns of each part.

    `deaths` maps a replica to the turns at whose start it dies, with all its parts.
    """

    def __init__(self, costs, speeds, deaths=None, revivals=0, calls_at_once=1) -> None:
        self.costs, self.speeds = costs, list(speeds)
        self.deaths = {rank: list(turns) for rank, turns in (deaths or {}).items()}
        self.revivals = revivals
        self.calls_at_once = calls_at_once
        self.turn = 0
        self.serving = set(range(len(speeds)))
        self.left = {}
        self.dead = set()
        self.done_by = {}
        self.begun = []
        self.told = []
        self.taken = Counter()

    def take(self):
        free = [r for r in self.serving if self.taken[r] < self.calls_at_once]
        if not free:
            return None
        replica = min(free, key=lambda rank: (self.taken[rank], rank))
        self.taken[replica] += 1
        return replica

    def give(self, replica):
        assert self.taken[replica]
        self.taken[replica] -= 1

    def begin(self, part, replica):
        if replica not in self.serving:
            raise ReplicaLostError(replica, RuntimeError("gone"))
        ticket = (len(self.begun), part, replica)
        self.begun.append((part, replica))
        self.left[ticket] = self.costs[part]
        return ticket

    def finished(self, tickets):
        self.turn += 1
        for rank, turns in self.deaths.items():
            if turns and turns[0] <= self.turn:
                turns.pop(0)
                self.serving.discard(rank)
                self.dead |= {ticket for ticket in tickets if ticket[2] == rank}
        for ticket in tickets:
            self.left[ticket] -= self.speeds[ticket[2]]
        return [t for t in tickets if t in self.dead or self.left[t] <= 0]

    def result(self, ticket, replica):
        _, part, _ = ticket
        if ticket in self.dead:
            raise ReplicaLostError(replica, RuntimeError(f"replica {replica} died"))
        assert part not in self.done_by
        self.done_by[part] = replica
        return f"answer {part}"

    def lost(self, error):
        self.told.append(error.replica)
        self.serving.discard(error.replica)

    def wait_for_replica(self):
        if not self.revivals:
            raise GenerationError("No generation replica is left")
        self.revivals -= 1
        self.serving = {0}


def answers(count):
    return [f"answer {part}" for part in range(count)]


def test_whoever_is_done_takes_the_next_part():
    server = Fake(costs=[4] * 12, speeds=[4, 1])
    assert serve_parts(12, server) == answers(12)
    fast = sum(replica == 0 for replica in server.done_by.values())
    assert fast >= 9
    assert len(server.begun) == 12


def test_several_calls_at_once_go_to_who_has_fewest():
    server = Fake(costs=[3] * 6, speeds=[1, 1], calls_at_once=3)
    assert serve_parts(6, server) == answers(6)
    assert [replica for _, replica in server.begun] == [0, 1] * 3


@pytest.mark.parametrize("at_once", [1, 3])
def test_parts_of_a_lost_replica_are_answered_once_by_others(at_once):
    server = Fake([5] * 9, [1, 1, 1], deaths={1: [3]}, calls_at_once=at_once)
    assert serve_parts(9, server) == answers(9)
    assert sorted(server.done_by) == list(range(9))
    assert 1 not in server.done_by.values()
    assert len(server.begun) == 9 + at_once
    assert server.told == [1] * at_once
    assert not server.taken.total()


def test_the_only_replica_comes_back():
    server = Fake([5] * 3, [1], deaths={0: [2]}, revivals=1)
    assert serve_parts(3, server) == answers(3)


def test_nobody_left():
    server = Fake([5] * 4, [1, 1], deaths={0: [2], 1: [3]})
    with pytest.raises(GenerationError, match="No generation replica is left"):
        serve_parts(4, server)


def test_rows_that_end_every_replica_are_named():
    server = Fake([9] * 2, [1], deaths={0: [2, 4, 6]}, revivals=9)
    with pytest.raises(GenerationError, match=r"3 replicas were lost.*part 0 of 2"):
        serve_parts(2, server)
    assert not server.taken.total()


def test_number_of_parts():
    assert num_parts(512, 1, 64, 1) == 1
    assert num_parts(512, 2, None, 1) == 2
    assert num_parts(512, 2, 64, 1) == 8
    assert num_parts(512, 3, 64, 1) == 9
    assert num_parts(512, 2, 256, 16) == 16
    assert num_parts(3, 2, 1, 1) == 3
    assert num_parts(1, 4, None, 16) == 1
