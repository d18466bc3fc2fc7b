from __future__ import annotations

import asyncio
import collections
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import rl_distributed_sample_queues as sample
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import (
    BatchError,
    DeadlineExceededError,
    QueueClosedError,
    WorkerDiedError,
)
from rl_distributed.queue_host import Answer, QueueHost
from rl_distributed.queues import BoundedQueue

WAIT_S = 60


# ---------------------------------------------------------------- the host, without Ray


@given(
    max_items=st.integers(1, 5),
    producers=st.lists(st.lists(st.integers(1, 7), max_size=6), min_size=1, max_size=4),
    consumers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_nothing_is_lost_doubled_or_swapped(
    max_items: int, producers: list[list[int]], consumers: list[int]
) -> None:
    """Producers put lists of the given sizes; consumers ask for so many at a time."""
    host = QueueHost(max_items, len(producers), redeliver=False)
    taken: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)

    async def produce(number: int, sizes: list[int]) -> None:
        value = 0
        for size in sizes:
            items = [(number, value + place) for place in range(size)]
            value += size
            while items:
                accepted, closed = await host.put(f"p{number}", items, WAIT_S)
                assert not closed
                assert host.qsize() <= max_items
                items = items[accepted:]
        await host.close(f"p{number}")

    async def consume(number: int, most: int) -> None:
        while True:
            answer = await host.get(f"c{number}", most, WAIT_S)
            if answer.state == "closed":
                return
            assert answer.state == "items"
            assert 1 <= len(answer.items) <= most
            taken[number] += answer.items

    async def everything() -> None:
        tasks = [produce(number, sizes) for number, sizes in enumerate(producers)]
        tasks += [consume(number, most) for number, most in enumerate(consumers)]
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)

    asyncio.run(everything())
    found = [item for items in taken.values() for item in items]
    assert sorted(found) == [
        (number, value)
        for number, sizes in enumerate(producers)
        for value in range(sum(sizes))
    ]
    for items in taken.values():
        for number in range(len(producers)):
            values = [value for who, value in items if who == number]
            assert values == sorted(values)


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, WAIT_S))


def test_a_wait_ends_in_its_time() -> None:
    async def scenario() -> None:
        host = QueueHost(2, 1, redeliver=False)
        assert await host.get("c", 1, 0.01) == Answer(
            "empty", detail="0 of 1 producers have closed"
        )
        assert await host.put("p", [1, 2, 3], 0.01) == (2, False)
        assert await host.put("p", [3], 0) == (0, False)
        assert (await host.get("c", 9, 0)).items == [1, 2]

    run(scenario())


class Life:
    """Answers pings until it ends."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def ping(self) -> bool:
        await self.end.wait()
        return False


def test_a_dead_consumers_items_go_to_others_in_order() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=True)
        life = Life()
        host.watch("dies", "the one that dies", life.ping)
        await host.put("p", [1, 2, 3, 4], 0)
        assert (await host.get("dies", 1, 0)).items == [1]
        assert (await host.get("dies", 2, 0)).items == [2, 3]  # confirms 1
        await host.close("p")
        assert (await host.get("lives", 1, 0)).items == [4]
        waiting = await host.get("lives", 1, 0)
        assert waiting.state == "empty"
        assert "not confirmed yet: the one that dies has 2" in waiting.detail
        life.end.set()
        assert (await host.get("lives", 1, WAIT_S)).items == [2]
        assert (await host.get("lives", 5, WAIT_S)).items == [3]
        assert (await host.get("lives", 1, WAIT_S)).state == "closed"

    run(scenario())


def test_a_dead_producer_breaks_the_queue_once_it_is_empty() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 2, redeliver=False)
        life = Life()
        host.watch("dies", "the one that dies", life.ping)
        await host.put("dies", [1], 0)
        await host.close("other")
        life.end.set()
        assert (await host.get("c", 1, 0)).items == [1]
        broken = await host.get("c", 1, WAIT_S)
        assert (broken.state, broken.detail) == ("broken", "the one that dies")

    run(scenario())


# -------------------------------------------------------------------------- through Ray


def actor(cls: type[Any]) -> Any:
    path = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    env = {"env_vars": {"PYTHONPATH": path}}
    return ray.remote(cls).options(num_cpus=0, runtime_env=env).remote()


@pytest.fixture
def queue(ray_cluster: None) -> Any:
    made = BoundedQueue.create(3, name="numbers", deadline_s=WAIT_S)
    yield made
    made.shutdown()


def test_actors_exchange_every_item_once(ray_cluster: None) -> None:
    queue = BoundedQueue.create(8, num_producers=2)
    producers = [actor(sample.Producer) for _ in range(2)]
    consumers = [actor(sample.Consumer) for _ in range(2)]
    calls = [c.take_all.remote(queue, number + 1) for number, c in enumerate(consumers)]
    puts = [p.put.remote(queue, n, 60) for n, p in enumerate(producers)]
    taken = ray.get(calls, timeout=WAIT_S)
    assert ray.get(puts, timeout=WAIT_S) == [60, 60]
    assert sorted(taken[0] + taken[1]) == [(n, v) for n in range(2) for v in range(60)]
    queue.shutdown()


def test_a_full_and_an_empty_queue_end_in_time(queue: BoundedQueue) -> None:
    with pytest.raises(
        DeadlineExceededError, match=r"'numbers' gave no item for 0\.1 s"
    ):
        queue.get(deadline_s=0.1)
    with pytest.raises(
        DeadlineExceededError, match=r"no room for 0\.1 s: 2 of 5 items"
    ):
        queue.put_many(range(5), deadline_s=0.1)
    assert queue.qsize() == 3
    assert queue.get_many(9) == [0, 1, 2]


def test_closing_is_clean(queue: BoundedQueue) -> None:
    other = pickle.loads(pickle.dumps(queue))
    queue.put_many(["a", "b"])
    queue.close()
    queue.close()
    assert list(other) == ["a", "b"]
    with pytest.raises(QueueClosedError, match="is closed and all its items are taken"):
        other.get()
    for client in (queue, other):
        with pytest.raises(QueueClosedError, match="1 of 1 items were not put"):
            client.put(1)


def test_a_batch_arrives_bit_by_bit(queue: BoundedQueue) -> None:
    batch = BatchedDataDict(
        a=torch.randn(300, 1000).bfloat16(),
        t=[torch.ones(2), torch.ones(3)],
        s=["x"] * 300,
    )
    batch["e"] = torch.zeros(300, 0)
    queue.put({"batch": batch, "nothing": np.zeros(0)})
    received = queue.get()["batch"]
    assert torch.equal(received["a"], batch["a"])
    assert all(map(torch.equal, received["t"], batch["t"]))
    assert received["s"] == batch["s"]
    assert received["e"].shape == (300, 0)


def test_a_dead_host_is_a_clear_error(ray_cluster: None) -> None:
    queue = BoundedQueue.create(3, name="numbers")
    queue.shutdown()
    for call in (lambda: queue.put(1), queue.get, queue.qsize, queue.close):
        with pytest.raises(WorkerDiedError, match="actor of queue 'numbers' is gone"):
            call()


def test_a_consumer_that_dies_gives_its_items_back(ray_cluster: None) -> None:
    queue = BoundedQueue.create(9, redeliver=True)
    consumer = actor(sample.Consumer)
    pid = ray.get(consumer.pid.remote(), timeout=WAIT_S)
    queue.put_many(range(6))
    queue.close()
    call = consumer.take_and_hang.remote(queue, 2)
    assert ray.get(call, timeout=WAIT_S) == [0, 1]
    assert queue.get_many(4) == [2, 3, 4, 5]
    os.kill(pid, signal.SIGKILL)
    assert queue.get_many(2, deadline_s=WAIT_S) == [0, 1]
    queue.confirm()
    with pytest.raises(QueueClosedError):
        queue.get(deadline_s=WAIT_S)
    queue.shutdown()


def test_without_redelivery_only_what_was_taken_is_lost(ray_cluster: None) -> None:
    queue = BoundedQueue.create(9)
    consumer = actor(sample.Consumer)
    pid = ray.get(consumer.pid.remote(), timeout=WAIT_S)
    queue.put_many(range(6))
    call = consumer.take_and_hang.remote(queue, 2)
    assert ray.get(call, timeout=WAIT_S) == [0, 1]
    os.kill(pid, signal.SIGKILL)
    queue.close()
    assert list(queue) == [2, 3, 4, 5]
    queue.shutdown()


def test_an_item_for_a_consumer_that_died_waiting_is_not_lost(
    ray_cluster: None,
) -> None:
    queue = BoundedQueue.create(9, redeliver=True)
    consumer = actor(sample.Consumer)
    pid = ray.get(consumer.pid.remote(), timeout=WAIT_S)
    call = consumer.wait_for_one.remote(queue)
    ready, _ = ray.wait([call], timeout=1.5)  # it is waiting by then, or soon after
    assert not ready
    os.kill(pid, signal.SIGKILL)
    queue.put("item")
    assert queue.get(deadline_s=WAIT_S) == "item"
    queue.shutdown()


def test_a_producer_that_dies_is_named(ray_cluster: None) -> None:
    queue = BoundedQueue.create(9, name="numbers")
    producer = actor(sample.Producer)
    pid = ray.get(producer.pid.remote(), timeout=WAIT_S)
    call = producer.put.remote(queue, 0, 3, close=False)
    assert ray.get(call, timeout=WAIT_S) == 3
    os.kill(pid, signal.SIGKILL)
    assert queue.get_many(3) == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(
        WorkerDiedError, match=r"ends early: actor .* died before closing"
    ):
        queue.get(deadline_s=WAIT_S)
    queue.shutdown()


@pytest.mark.usefixtures("ray_cluster")
def test_sizes_must_be_positive() -> None:
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(BatchError, match="must be a positive integer: got 0"):
            BoundedQueue.create(sizes[0], num_producers=sizes[1])
