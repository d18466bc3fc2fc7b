"""Typed calls: `group.all.run(...)`, `group[0].run(...)`, and what mypy infers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError, WorkerMethodError
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers import RayWorkerGroup


class Counting:
    """Counts in its own process."""

    def scale(self, value: int, factor: int = 2) -> int:
        return value * factor

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def up_to(self, limit: int):
        yield from range(limit)

    def collect(self, *values: int) -> int:
        return sum(values)


@pytest.fixture(scope="module")
def group(ray_cluster):
    sharding = NamedSharding([[0, 1]], ["replica", "data"])
    with (
        RayVirtualCluster([2], name="typed") as cluster,
        RayWorkerGroup(cluster, Counting, sharding_annotations=sharding) as group,
    ):
        yield group


def test_all_workers_get_the_same(group):
    assert group.all.scale(value=3).result() == [6, 6]
    assert group.all.call(Counting.scale, 3, factor=4).result() == [12, 12]
    assert group.all.rank().result() == [0, 1]


def test_one_worker_gives_its_value(group):
    assert group[1].rank().result() == 1
    assert group[0].call(Counting.scale, 5).result() == 10
    assert [calls.rank().result() for calls in group] == [0, 1]
    with pytest.raises(IndexError, match="workers 0 to 1: got rank 2"):
        group[2]


def test_each_and_shards(group):
    assert group.each.scale(value=[1, 2]).result() == [2, 4]
    assert group.each.call(Counting.scale, value=[1, 2], factor=[3, 4]).result() == [
        3,
        8,
    ]
    found = group.sharded("data", common={"factor": 10}).scale(value=[1, 2])
    assert found.result() == [10, 20]


def test_one_future_for_all_uses(group):
    async def both() -> tuple[list[int], int]:
        return await group.all.rank(), await group[1].rank()

    assert asyncio.run(both()) == ([0, 1], 1)
    assert sorted(result.value for result in group.all.rank()) == [0, 1]
    assert [o.value for o in group[0].rank().outcomes(60.0)] == [0]
    assert group[0].up_to(limit=3).result(60.0) == [0, 1, 2]


def test_options_are_apart_from_arguments(group):
    timed = group.all.options(call_deadline_s=120.0)
    assert timed.scale(value=1).result() == [2, 2]
    with pytest.raises(ConfigError, match="call_deadline_s must be positive"):
        group[0].options(call_deadline_s=-1.0).rank()


def test_wrong_calls_are_refused(group):
    with pytest.raises(WorkerMethodError, match=r"no method 'scal'.*'scale'"):
        group.all.scal(value=1)
    with pytest.raises(ConfigError, match=r"given by name: got 1 by position"):
        group.all.scale(1)
    with pytest.raises(ConfigError, match=r"\*args have none"):
        group.all.call(Counting.collect, 1, 2)
    with pytest.raises(ConfigError, match=r"'scale' takes 2 arguments.*got 3"):
        group.all.call(Counting.scale, 1, 2, 3)
    with pytest.raises(ConfigError, match="got 'value' by place and by name"):
        group[0].call(Counting.scale, 1, value=2)


def test_mypy_knows_methods_and_results(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from rl_distributed.workers import RayWorkerGroup\n"
        "class Trial:\n"
        "    def run(self, lr: float) -> str:\n"
        "        return str(lr)\n"
        "def use(group: RayWorkerGroup[Trial], other: RayWorkerGroup) -> None:\n"
        "    reveal_type(group.all.call(Trial.run, lr=0.1).result())\n"
        "    reveal_type(group[0].call(Trial.run, 0.1).result())\n"
        "    reveal_type(group.each.call(Trial.run, lr=[0.1, 0.2]).result())\n"
        "    group.all.call(Trial.run, lr='fast')\n"
        "    other.all.run(lr=0.1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = [line.split(": ", 1)[1] for line in done.stdout.splitlines()[:-1]]
    assert said == [
        'note: Revealed type is "list[str]"',
        'note: Revealed type is "str"',
        'note: Revealed type is "list[str]"',
        'error: Argument "lr" to "call" of "AllCalls" has incompatible type "str"; '
        'expected "float"  [arg-type]',
    ], done.stdout
