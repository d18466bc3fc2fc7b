"""Communication between the ranks of a replica, led by one of them."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import AuthenticationError

import pytest

from rl_models.errors import WeightSyncError
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm import rank_meeting
from rl_models.generation.vllm.async_engine import AsyncEngine
from rl_models.generation.vllm.rank_link import FollowersEnd, LeadersEnd
from rl_models.generation.vllm.rank_weight_update import RankWeightUpdate

WAIT_S = 60.0


@contextmanager
def linked(num_ranks=2):
    """The endpoint of rank 0, those of the others, and the losses reported."""
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
        # Those of the first call were never requested.
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


@contextmanager
def connected(leader, *sent):
    """Open a connection that sends this and then nothing."""
    address, port, _ = leader.ticket
    with socket.create_connection((address, port), timeout=WAIT_S) as end:
        for part in sent:
            end.sendall(part)
        yield end


def met(leader, *ranks, num_ranks=None, **limits):
    """Let these ranks connect once others have; return the meeting."""
    pool = ThreadPoolExecutor(len(ranks) + 1)
    meeting = pool.submit(
        rank_meeting.meet,
        leader._server,
        leader._secret,
        num_ranks or len(ranks),
        **limits,
    )
    ends = [pool.submit(FollowersEnd, rank, leader.ticket, print) for rank in ranks]
    pool.shutdown(wait=False)
    return meeting, ends


def is_closed(end):
    """Wait until the other side has closed a connection."""
    end.settimeout(WAIT_S)
    try:
        while end.recv(4_096):
            pass
    except ConnectionError:
        pass
    return True


def test_a_wrong_secret_is_refused_and_the_right_peer_gets_in(monkeypatch):
    warnings = queue.Queue()
    monkeypatch.setattr(
        rank_meeting._logger,
        "warning",
        lambda text, *values: warnings.put(text % values),
    )
    leader = LeadersEnd("127.0.0.1", print)
    address, port, _ = leader.ticket
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(leader.accept, 1)
        with pytest.raises(AuthenticationError, match="digest"):
            FollowersEnd(1, (address, port, b"guessed"), print)
        assert not accepted.done()
        # In time: a meeting that is over refuses nobody any more.
        warning = warnings.get(timeout=WAIT_S)
        assert "was refused: it does not know the secret" in warning
        follower = FollowersEnd(1, leader.ticket, print)
        accepted.result(WAIT_S)
    number = leader.send("step", (), {})
    assert next(follower.calls()) == (number, "step", (), {})
    leader.end("shutdown")
    follower.close()
    leader.close()


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00\x00\x00\x04" + b"none",
    b"\xff\xff\xff\xff" + b"\x7f" * 8,
    b"\x7f\xff\xff\xff" + b"a" * 10_000,
]


@pytest.mark.parametrize("sent", GARBAGE)
def test_garbage_is_refused_and_the_right_peer_gets_in(sent, caplog):
    leader = LeadersEnd("127.0.0.1", print)
    with connected(leader, sent) as end:
        meeting, _ = met(leader, deadline_s=WAIT_S, num_ranks=1)
        assert is_closed(end)
        right = FollowersEnd(1, leader.ticket, print)
        assert list(meeting.result(WAIT_S)) == [1]
    right.close()
    assert "to rank 0 of the replica was refused: it " in caplog.text


def test_who_connects_and_goes_costs_nothing():
    leader = LeadersEnd("127.0.0.1", print)
    for _ in range(20):
        with connected(leader):
            pass
    meeting, [end] = met(leader, 1, deadline_s=WAIT_S)
    assert list(meeting.result(WAIT_S)) == [1]
    end.result(WAIT_S).close()


def test_silent_connections_hold_nobody_up():
    leader = LeadersEnd("127.0.0.1", print)
    with connected(leader) as silent, connected(leader, b"\x00") as slow:
        # Their limit is beyond the deadline: nothing waits for it.
        limits = {"deadline_s": WAIT_S, "handshake_s": 10 * WAIT_S}
        meeting, ends = met(leader, 2, 1, **limits)
        assert set(meeting.result(WAIT_S)) == {1, 2}
        assert is_closed(silent)
        assert is_closed(slow)
    for end in ends:
        end.result(WAIT_S).close()


def test_a_handshake_has_a_limit(caplog):
    leader = LeadersEnd("127.0.0.1", print)
    with connected(leader) as silent:
        limits = {"deadline_s": WAIT_S, "handshake_s": 0.05}
        meeting, _ = met(leader, num_ranks=1, **limits)
        assert is_closed(silent)
        assert not meeting.done()
        shut_down(leader)
    assert "did not prove within 0.05 s that it knows the secret" in caplog.text


def shut_down(leader):
    """Let the last rank in, so that the meeting ends."""
    FollowersEnd(1, leader.ticket, print).close()


def test_a_missing_rank_is_told_with_what_else_connected():
    leader = LeadersEnd("127.0.0.1", print)
    address, port, secret = leader.ticket
    with connected(leader, GARBAGE[0]) as bad, connected(leader):
        limits = {"deadline_s": 3.0, "handshake_s": WAIT_S}
        meeting, [first] = met(leader, 1, num_ranks=3, **limits)
        assert is_closed(bad)
        with pytest.raises(AuthenticationError):
            FollowersEnd(2, (address, port, b"guessed"), print)
        # A rank that is already there, and one that is not expected.
        again = [FollowersEnd(rank, leader.ticket, print) for rank in (1, 7, "2")]
        with pytest.raises(TimeoutError) as error:
            meeting.result(WAIT_S)
        for end in [first.result(WAIT_S), *again]:
            end.close()
    said = str(error.value)
    assert f"rank 2, 3 of the replica did not connect to {address}:{port}" in said
    assert "within 3 s; 6 other connections were refused (" in said
    assert "1 does not know the secret" in said
    assert "1 was silent so far" in said
    assert "which is not awaited" in said
    assert secret.hex() not in said


def test_nobody_at_all():
    leader = LeadersEnd("127.0.0.1", print)
    ticket = leader.ticket
    with pytest.raises(TimeoutError, match=r"rank 1, 2 .*; no connection was refused"):
        leader.accept(2, deadline_s=0.05)
    with pytest.raises(OSError, match="refused"):
        FollowersEnd(1, ticket, print)


def test_rank_0_that_does_not_answer_has_a_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = rank_meeting.link_of(
            socket.create_connection(server.getsockname(), WAIT_S)
        )
        with pytest.raises(TimeoutError, match="did not end within"):
            rank_meeting.greet_leader(link, b"secret", 1, 0.05)
        link.close()


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
    """An engine whose ranks report this, one look after the other."""

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
