"""What goes between the ranks of a replica that one of them leads."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rl_models.errors import WeightSyncError
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.async_engine import AsyncEngine
from rl_models.generation.vllm.rank_link import FollowersEnd, LeadersEnd
from rl_models.generation.vllm.rank_weight_update import RankWeightUpdate

WAIT_S = 60.0


@contextmanager
def linked(num_ranks=2):
    """The end of rank 0, those of the others, and who was told of a loss."""
    losses = queue.Queue()
    leader = LeadersEnd("127.0.0.1", losses.put)
    with ThreadPoolExecutor(num_ranks) as pool:
        others = [
            pool.submit(FollowersEnd, rank, leader.ticket, losses.put)
            for rank in range(num_ranks, 0, -1)
        ]
        leader.accept(num_ranks)
        followers = [other.result(WAIT_S) for other in reversed(others)]
    try:
        yield leader, followers, losses
    finally:
        leader.close()
        for follower in followers:
            follower.close()


def test_calls_come_in_order_and_results_by_rank():
    with linked() as (leader, followers, losses):
        numbers = [leader.send("step", (n,), {"more": n}) for n in range(3)]
        for rank, follower in enumerate(followers, 1):
            calls = follower.calls()
            for n in range(3):
                assert next(calls) == (numbers[n], "step", (n,), {"more": n})
                follower.answer(numbers[n], True, (rank, n))
        # Those of the first call were never asked for.
        assert leader.results(numbers[1], WAIT_S) == [(1, 1), (2, 1)]
        assert leader.results(numbers[2], WAIT_S) == [(1, 2), (2, 2)]
        number = leader.send("step", (), {})
        followers[0].answer(number, False, "ValueError: no room")
        with pytest.raises(RuntimeError, match="another rank failed: ValueError: no r"):
            leader.results(number, WAIT_S)
        with pytest.raises(TimeoutError, match="did not answer within 0"):
            leader.results(leader.send("step", (), {}), 0.0)
        assert losses.empty()


def test_the_end_of_a_rank_is_told_to_the_others_at_once():
    with linked() as (_, followers, losses):
        followers[1].close()
        assert losses.get(timeout=WAIT_S) == "rank 2 of the replica has ended"
        assert losses.empty()
    with linked(1) as (leader, followers, losses):
        leader.end("shutdown")
        assert next(followers[0].calls())[1] == "shutdown"
        followers[0].close()
        leader.close()
        assert list(followers[0].calls()) == []
        assert losses.empty()
    with linked(1) as (leader, followers, losses):
        leader.close()
        assert losses.get(timeout=WAIT_S) == "rank 0 of the replica has ended"
        assert list(followers[0].calls()) == []


def test_who_does_not_know_the_secret_is_not_let_in():
    leader = LeadersEnd("127.0.0.1", print)
    address, port, _ = leader.ticket
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(FollowersEnd, 1, (address, port, b"guessed"), print)
        with pytest.raises(Exception, match="digest"):
            leader.accept(1)
        with pytest.raises(Exception, match="digest"):
            wrong.result(WAIT_S)


FILE = ("/dev/shm/weights", [])


@pytest.fixture
def staged():
    return RankWeightUpdate(WAIT_S)


def offered(staged, pool):
    """An offer that waits for the leader."""
    call = pool.submit(staged.offer, FILE)
    pause = threading.Event()
    while staged.state(1) is None:
        assert not call.done()
        pause.wait(0.001)
    return call


def test_weights_are_kept_until_they_are_loaded(staged):
    assert staged.state(1) is None
    staged.begin()
    assert staged.state(1) is None
    with pytest.raises(WeightSyncError, match="no weights to load"):
        staged.file()
    with ThreadPoolExecutor(1) as pool:
        call = offered(staged, pool)
        assert staged.state(1) == ""
        assert staged.state(2) is None
        assert staged.file() == FILE
        staged.loaded("")
        assert call.result(WAIT_S) is None
        staged.begin()
        assert staged.state(1) == "update 1 of this rank has ended already"
        assert staged.state(2) is None


@pytest.mark.parametrize("end", [RankWeightUpdate.loaded, "drop"])
def test_what_keeps_them_from_being_loaded_is_raised(staged, end):
    staged.begin()
    with ThreadPoolExecutor(1) as pool:
        call = offered(staged, pool)
        if end == "drop":
            staged.drop(1, "rank 0 got half")
        else:
            end(staged, "rank 0 got half")
        with pytest.raises(WeightSyncError, match="rank 0 got half"):
            call.result(WAIT_S)


def test_an_update_that_was_dropped_before_the_weights_came_is_not_waited_for(staged):
    staged.drop(1, "rank 0 got half")
    staged.begin()
    with pytest.raises(WeightSyncError, match="rank 0 got half"):
        staged.offer(FILE)
    staged.begin()
    staged.refuse("w1 came as int8")
    assert staged.state(2) == "w1 came as int8"
    with pytest.raises(WeightSyncError, match=r"take the weights within 0 s"):
        RankWeightUpdate(0.0).offer(FILE)


class Ranks:
    """An engine whose ranks say this, one look after the other."""

    def __init__(self, *looks):
        self.looks = list(looks)
        self.dropped = None

    async def collective_rpc(self, method, args):
        if method == "rl_drop_staged":
            self.dropped = args
            return [None, None]
        assert (method, args) == ("rl_staged", (1,))
        return self.looks.pop(0)


def meet(ranks, deadline_s=WAIT_S):
    engine = object.__new__(AsyncEngine)
    engine._llm = ranks
    engine._place = ReplicaRank(0, 2, "127.0.0.1", 4242)
    engine._num_updates = 0
    engine._update_deadline_s = deadline_s
    engine.begin_update()
    asyncio.run(engine._meet())


def test_weights_are_loaded_once_every_rank_has_them():
    ranks = Ranks(["", None], ["", None], ["", ""])
    meet(ranks)
    assert ranks.looks == []
    assert ranks.dropped is None


def test_nobody_loads_weights_that_a_rank_is_without():
    ranks = Ranks(["", None], ["", "w1 came as int8"])
    with pytest.raises(WeightSyncError, match="w1 came as int8"):
        meet(ranks)
    assert ranks.dropped == (1, "w1 came as int8")
    ranks = Ranks(["", None])
    with pytest.raises(WeightSyncError, match="Rank 1 of the replica did not have all"):
        meet(ranks, deadline_s=-1.0)
    assert ranks.dropped[0] == 1
