from __future__ import annotations

import asyncio
import collections
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import rl_distributed_sample_queues as sample
import torch
from hypothesis import given, strategies as st

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    BatchError,
    DeadlineExceededError,
    QueueClosedError,
    WorkerDiedError,
)
from rl_distributed.queues.host import Answer, ClientOrigin, QueueHost
from rl_distributed.queues.queue import BoundedQueue
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup, RestartWorker

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
    """Producers put lists of the given sizes; consumers ask for some at a time."""
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


def origin(process: str, producer: str = "worker 1") -> ClientOrigin:
    return ClientOrigin(producer, process, f"{producer} in {process}")


async def start(host: QueueHost, client: str, where: ClientOrigin) -> Life:
    """Introduce a client that lives until its `end` is set."""
    life = Life()
    host.watch(client, where, life.ping)
    return life


async def death(host: QueueHost, life: Life) -> None:
    """Stop a client, and wait until the host has noticed."""
    life.end.set()
    while not host._dead():
        await asyncio.sleep(0)


@pytest.mark.parametrize("announced", [1, 2])
def test_a_dead_producer_does_not_close_the_queue_for_others(announced: int) -> None:
    async def scenario() -> None:
        host = QueueHost(9, announced, redeliver=False)
        life = await start(host, "dies", origin("p1", "worker 1"))
        await start(host, "lives", origin("p2", "worker 2"))
        assert await host.put("dies", [1], 0) == (1, False)
        assert await host.put("lives", [2], 0) == (1, False)
        await death(host, life)
        assert await host.put("lives", [3, 4], 0) == (2, False)
        assert (await host.get("c", 9, WAIT_S)).items == [1, 2, 3, 4]
        waiting = await host.get("c", 1, 0)
        assert waiting.state == "empty"
        assert "dead, and not back: worker 1 in p1" in waiting.detail
        await host.close("lives")
        broken = await host.get("c", 1, WAIT_S)
        assert (broken.state, broken.detail) == ("broken", "worker 1 in p1")

    run(scenario())


def test_a_producer_that_was_started_again_goes_on() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 2, redeliver=False)
        life = await start(host, "first", origin("p1"))
        await host.put("first", [1], 0)
        await host.close("other")
        await death(host, life)
        assert (await host.get("c", 9, 0)).items == [1]
        assert (await host.get("c", 9, WAIT_S)).state == "broken"
        # A notification is not an end: it is back.
        await start(host, "second", origin("p2"))
        assert await host.put("second", [2], 0) == (1, False)
        assert (await host.get("c", 9, 0)).items == [2]
        assert (await host.get("c", 9, 0)).state == "empty"
        await host.close("second")
        assert (await host.get("c", 9, WAIT_S)).state == "closed"

    run(scenario())


def test_consumers_wait_for_a_producer_to_come_back() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=False, producer_return_s=WAIT_S / 2)
        life = await start(host, "first", origin("p1"))
        await host.put("first", [1], 0)
        await death(host, life)
        assert (await host.get("c", 9, 0)).items == [1]
        assert (await host.get("c", 9, 0.05)).state == "empty"
        getting = asyncio.create_task(host.get("c", 9, WAIT_S))
        await asyncio.sleep(0)
        await start(host, "second", origin("p2"))
        await host.put("second", [2], 0)
        assert (await getting).items == [2]
        # Not forever.
        host = QueueHost(9, 1, redeliver=False, producer_return_s=0.1)
        life = await start(host, "first", origin("p1"))
        await host.put("first", [1], 0)
        await death(host, life)
        await host.get("c", 9, 0)
        assert (await host.get("c", 9, WAIT_S)).state == "broken"

    run(scenario())


def test_what_a_producer_closes_again_counts_once() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 2, redeliver=False)
        life = await start(host, "first", origin("p1"))
        await host.close("first")
        life.end.set()
        await start(host, "second", origin("p2"))
        await host.put("second", [1], 0)
        await host.close("second")
        assert (await host.get("c", 9, 0)).items == [1]
        assert (await host.get("c", 9, 0)).state == "empty"
        await host.close("other")
        assert (await host.get("c", 9, WAIT_S)).state == "closed"

    run(scenario())


def test_who_only_puts_need_not_close() -> None:
    """With many producers, the driver closes the queue when all are done."""

    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=False)
        for number in range(3):
            await start(host, f"copy {number}", origin("p1"))
            await start(host, f"other {number}", origin("q1", "worker 2"))
            await host.put(f"copy {number}", [number], 0)
            await host.put(f"other {number}", [number], 0)
        await host.close("driver")
        assert len((await host.get("c", 9, 0)).items) == 6
        assert (await host.get("c", 9, 0)).state == "closed"
        assert await host.put("copy 1", [1], 0) == (0, True)

    run(scenario())


def test_the_queue_waits_for_all_that_registered() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=False)
        await host.register("a1", "a")
        await host.register("b1", "b")
        await host.close("a1")
        waiting = await host.get("c", 1, 0)
        assert waiting.state == "empty"
        assert "1 of 1 producers have closed; still open: producer 'b'" in (
            waiting.detail
        )
        # A client that returns under its name is the same one.
        await host.register("b2", "b")
        assert await host.put("b2", [1], 0) == (1, False)
        await host.close("b2")
        assert (await host.get("c", 1, 0)).items == [1]
        assert (await host.get("c", 1, 0)).state == "closed"
        assert await host.put("b2", [2], 0) == (0, True)

    run(scenario())


def test_a_registered_producer_is_named_when_it_dies() -> None:
    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=False)
        life = await start(host, "first", origin("p1"))
        await host.register("first", "a")
        await host.close("other")
        await death(host, life)
        broken = await host.get("c", 1, WAIT_S)
        assert broken.detail == "producer 'a', worker 1 in p1,"
        await start(host, "second", origin("p2", "worker 5"))
        await host.register("second", "a")
        assert (await host.get("c", 1, 0)).state == "empty"
        await host.close("second")
        assert (await host.get("c", 1, 0)).state == "closed"

    run(scenario())


def test_a_consumer_that_was_started_again_as_the_same_actor_gives_back() -> None:
    """Ray restarts an actor under the same id, so that pings are answered."""

    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=True)
        await start(host, "first", origin("p1"))
        await host.put("x", [1, 2], 0)
        assert (await host.get("first", 2, 0)).items == [1, 2]
        await start(host, "second", origin("p2"))
        assert (await host.get("second", 2, WAIT_S)).items == [1, 2]
        assert (await host.get("first", 2, 0)).detail == "this client died"

    run(scenario())


def test_a_process_is_watched_once_whatever_copies_of_the_queue_it_has() -> None:
    """One that is sent the queue with each call makes a copy each time."""

    async def scenario() -> None:
        host = QueueHost(9, 1, redeliver=True)
        pings = 0
        dies = asyncio.Event()

        async def ping() -> bool:
            nonlocal pings
            pings += 1
            await dies.wait()
            return False

        await host.put("x", [1, 2, 3], 0)
        for number in range(3):
            host.watch(f"copy {number}", origin("p1", "worker 5"), ping)
            assert (await host.get(f"copy {number}", 1, 0)).items == [number + 1]
        assert (await host.put("copy 2", [4], 0))[0] == 1
        await asyncio.sleep(0)
        assert pings == 1
        dies.set()
        while host.qsize() < 4:
            await asyncio.sleep(0.01)
        # What was taken first is the first again.
        assert (await host.get("c", 4, 0)).items == [1, 2, 3, 4]
        late = await host.get("copy 1", 1, 0)
        assert late.detail == "this client died"
        assert (await host.get("c", 1, WAIT_S)).state == "broken"

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
        t=[torch.ones(2), torch.ones(3)] * 150,
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
    ready, _ = ray.wait([call], timeout=1.5)  # by then, or soon after, it is waiting
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


@pytest.fixture
def loaders(ray_cluster: None) -> Any:
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder("rl_distributed_sample_queues.Producer"),
            name_prefix="loaders",
            failure_policy=RestartWorker(),
        ) as group,
    ):
        yield group


def put(group: RayWorkerGroup, queue: BoundedQueue, rank: int, **more: Any) -> None:
    call = group.run_single_worker_single_data(
        "put", rank, queue=queue, number=rank, count=2, **more
    )
    assert group.get_all_worker_results([call], deadline_s=WAIT_S) == [2]


def test_a_worker_that_dies_is_named_by_group_and_rank(loaders: Any) -> None:
    queue = BoundedQueue.create(9, name="rows", num_producers=2)
    put(loaders, queue, 0)
    put(loaders, queue, 1, close=False)
    pid = loaders.worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    assert len(queue.get_many(9)) == 4
    with pytest.raises(WorkerDiedError) as caught:
        queue.get(deadline_s=WAIT_S)
    assert f"worker 1 of group 'loaders' (node 127.0.0.1, pid {pid}) died" in str(
        caught.value
    )
    queue.shutdown()


def test_a_worker_that_is_started_again_is_the_same_producer(loaders: Any) -> None:
    queue = BoundedQueue.create(
        9, name="rows", num_producers=2, producer_return_s=WAIT_S
    )
    put(loaders, queue, 1, close=False)
    pid = loaders.worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    # The other one puts and closes; nothing ends because of the dead one.
    put(loaders, queue, 0)
    assert sorted(queue.get_many(9)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    put(loaders, queue, 1)
    assert loaders.worker_pids[1] != pid
    assert list(queue) == [(1, 0), (1, 1)]
    queue.shutdown()


@pytest.mark.usefixtures("ray_cluster")
def test_producers_by_name() -> None:
    queue = BoundedQueue.create(9)
    other = pickle.loads(pickle.dumps(queue))
    other.register("b", deadline_s=WAIT_S)
    queue.put(1)
    queue.close()
    assert queue.get(deadline_s=WAIT_S) == 1
    with pytest.raises(DeadlineExceededError, match="still open: producer 'b'"):
        queue.get(deadline_s=0.1)
    again = pickle.loads(pickle.dumps(queue))
    again.register("b", deadline_s=WAIT_S)
    again.put(2)
    again.close()
    assert list(queue) == [2]
    queue.shutdown()


@pytest.mark.usefixtures("ray_cluster")
def test_sizes_must_be_positive() -> None:
    with pytest.raises(BatchError, match="producer_return_s must not be negative"):
        BoundedQueue.create(1, producer_return_s=-1.0)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(BatchError, match="must be a positive integer: got 0"):
            BoundedQueue.create(sizes[0], num_producers=sizes[1])


@pytest.mark.usefixtures("ray_cluster")
def test_queues_of_one_actor_end_one_by_one() -> None:
    first, second = BoundedQueue.create_many(9, ["first", "second"])
    (third,) = BoundedQueue.create_many(9, ["third"], beside=first)
    for number, queue in enumerate((first, second, third)):
        queue.put(number)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pickle.loads(pickle.dumps(second)).get_many, 2)
        assert waiting.result(WAIT_S) == [1]
        waiting = pool.submit(pickle.loads(pickle.dumps(second)).get)
        first.shutdown()
        with pytest.raises(WorkerDiedError, match="queue 'first' was shut down"):
            first.get()
        second.put("more")
        assert waiting.result(WAIT_S) == "more"
        waiting = pool.submit(pickle.loads(pickle.dumps(second)).get)
        second.shutdown()
        with pytest.raises(WorkerDiedError, match="queue 'second' was shut down"):
            waiting.result(WAIT_S)
    assert third.get() == 2
    third.shutdown()
    with pytest.raises(WorkerDiedError, match="queue 'third' is gone"):
        third.get()
    third.shutdown()
