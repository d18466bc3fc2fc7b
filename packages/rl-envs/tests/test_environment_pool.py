"""Conversations judged one by one: back-pressure, faults, counts, bounded memory."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    WorkerDiedError,
    WorkerHungError,
)
from rl_envs.environment_pool import EnvironmentPool, LaneConfig
from rl_envs.environment_pool.slots import Slots
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn, total_reward
from rl_envs.remote import RemoteEnvironment

NUM_CONVERSATIONS = 2000
NUM_TURNS = 3
WAIT_S = 120.0


def counting_environment() -> type[EnvironmentInterface[Any]]:
    """Return a class that no other process can import: it travels by value."""

    class Counting(EnvironmentInterface[Any]):
        """Counts the turns of each conversation, and obeys some words."""

        def step(
            self, message_log_batch: Sequence[Any], metadata: Sequence[Any]
        ) -> EnvironmentReturn[Any]:
            for log in message_log_batch:
                word, _, path = str(log[-1]["content"]).partition(" ")
                if word == "die":
                    os._exit(3)
                if word == "raise":
                    raise ValueError("on purpose")
                if word == "hang":
                    time.sleep(300)
                while word == "wait" and not Path(path).exists():
                    time.sleep(0.01)
            turns = [row["turns"] + 1 for row in metadata]
            return EnvironmentReturn(
                observations=[{"role": "user", "content": f"{t}"} for t in turns],
                metadata=[
                    {**row, "turns": t} for row, t in zip(metadata, turns, strict=True)
                ],
                next_stop_strings=[None] * len(turns),
                rewards={
                    "reward/end": [
                        float(t == row["last"])
                        for t, row in zip(turns, metadata, strict=True)
                    ],
                    "reward/size": [float(len(turns))] * len(turns),
                },
                terminateds=[
                    t == row["last"] for t, row in zip(turns, metadata, strict=True)
                ],
                answers=None,
            )

        def shutdown(self) -> None:
            if os.environ.get("NEVER"):
                raise OSError("on purpose")

    return Counting


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def row(last: int = 1) -> dict[str, int]:
    return {"turns": 0, "last": last}


def size_of(result: EnvironmentReturn[Any]) -> float:
    """Return the number of rows in the call of a result."""
    assert isinstance(result.rewards, dict)
    return float(result.rewards["reward/size"][0])


async def converse(pool: EnvironmentPool, name: str, number: int) -> int:
    """Play a conversation with a policy that answers at once; return its turns."""
    metadata: Any = {"turns": 0, "last": NUM_TURNS, "number": number}
    log = [{"role": "user", "content": f"conversation {number}"}]
    for turn in range(NUM_TURNS):
        log.append({"role": "assistant", "content": f"{number}:{turn}"})
        found = await pool.step(name, log, metadata)
        [metadata], [observation] = found.metadata, found.observations
        assert metadata["number"] == number
        log.append(dict(observation))  # type: ignore[arg-type]
        assert bool(found.terminateds[0]) == (turn == NUM_TURNS - 1)
    return int(metadata["turns"])


@pytest.mark.usefixtures("ray_cluster")
def test_two_thousand_conversations_at_once_within_bounds() -> None:
    async def all_of(pool: EnvironmentPool, number: int) -> list[int]:
        tasks = [converse(pool, "a" if i % 2 else "b", i) for i in range(number)]
        return await asyncio.gather(*tasks)

    made = counting_environment()
    config = LaneConfig(num_workers=1, rows_per_call=64, max_pending=200)
    with EnvironmentPool({"a": made, "b": made()}, config) as pool:
        asyncio.run(all_of(pool, 64))  # imports and connections
        gc.collect()
        process = psutil.Process()
        before = process.memory_info().rss
        assert asyncio.run(all_of(pool, NUM_CONVERSATIONS)) == (
            [NUM_TURNS] * NUM_CONVERSATIONS
        )
        gc.collect()
        grown = process.memory_info().rss - before
        counts = pool.metrics()
    for name in "ab":
        assert counts[f"{name}/rows"] == (NUM_CONVERSATIONS + 64) / 2 * NUM_TURNS
        # This many are queued or judged; the others wait with their callers.
        assert 64 <= counts[f"{name}/pending_max"] <= 200
        assert counts[f"{name}/pending"] == 0
        assert counts[f"{name}/failed_rows"] == counts[f"{name}/lost_workers"] == 0
        assert counts[f"{name}/rows_per_call"] > 4
        assert counts[f"{name}/wait_s_max"] >= counts[f"{name}/wait_s_mean"] > 0
    assert grown < 64 << 20


@pytest.mark.usefixtures("ray_cluster")
def test_faults_cost_only_their_own_conversation(tmp_path: Path) -> None:
    config = LaneConfig(rows_per_call=8, deadline_s=5.0, attempts=1)
    with EnvironmentPool({"a": counting_environment()}, config) as pool:
        # While the only instance is busy, the others queue together.
        gate = tmp_path / "gate"
        first = pool.submit("a", says(f"wait {gate}"), row())
        words = ["ok", "die", "ok", "raise", "ok", "hang"]
        futures = [pool.submit("a", says(word), row()) for word in words]
        gate.touch()
        assert size_of(first.result(WAIT_S)) == 1.0
        for future, word in zip(futures, words, strict=True):
            error = future.exception(WAIT_S)
            if word == "ok":
                assert error is None
                assert future.result().metadata == [{"turns": 1, "last": 1}]
            elif word == "die":
                assert isinstance(error, WorkerDiedError)
            elif word == "hang":
                assert isinstance(error, WorkerHungError | DeadlineExceededError)
            else:
                assert "on purpose" in str(error)
            if error is not None:
                assert any("environment 'Counting'" in n for n in error.__notes__)
        counts = pool.metrics()
        assert counts["a/rows"] == 7
        assert counts["a/failed_rows"] == 3
        # Once together, then `die` and `hang` separately.
        assert counts["a/lost_workers"] >= 3
        again = pool.submit("a", says("ok"), row()).result(WAIT_S)
        assert size_of(again) == 1.0


@pytest.mark.usefixtures("ray_cluster")
def test_callers_wait_for_room_and_may_give_up(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = LaneConfig(rows_per_call=8, max_pending=3)

    async def crowd(pool: EnvironmentPool) -> list[float]:
        waiting = [asyncio.create_task(pool.step("a", says("ok"), row())) for _ in "12"]
        await asyncio.sleep(0)
        late = asyncio.create_task(pool.step("a", says("late"), row()))
        gone = asyncio.create_task(pool.step("a", says("gone"), row()))
        done, _ = await asyncio.wait([*waiting, late, gone], timeout=0.2)
        assert not done
        assert pool.metrics()["a/pending"] == 3
        gone.cancel()
        with pytest.raises(
            DeadlineExceededError, match=r"3 pending conversations.*max_pend"
        ):
            pool.submit("a", says("ok"), row(), timeout_s=0.01)
        gate.touch()
        results = await asyncio.gather(*waiting, late)
        assert gone.cancelled()
        return [size_of(result) for result in results]

    with EnvironmentPool({"a": counting_environment()}, config) as pool:
        first = pool.submit("a", says(f"wait {gate}"), row())
        sizes = asyncio.run(crowd(pool))
        assert min(sizes[:2]) >= 2.0  # they were queued together
        assert first.result(WAIT_S).terminateds[0]
        assert pool.metrics()["a/rows"] == 4
        assert pool.metrics()["a/pending"] == 0


@pytest.mark.usefixtures("ray_cluster")
def test_closing_fails_what_waits(tmp_path: Path) -> None:
    config = LaneConfig(max_pending=2, deadline_s=300.0)
    pool = EnvironmentPool({"a": counting_environment()}, config)
    judged = pool.submit("a", says(f"wait {tmp_path / 'never'}"), row())
    waiting = pool.submit("a", says("ok"), row())
    blocked: list[BaseException] = []

    def block() -> None:
        try:
            pool.submit("a", says("ok"), row())
        except WorkerDiedError as error:
            blocked.append(error)

    thread = threading.Thread(target=block)
    thread.start()
    pool.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for error in (judged.exception(WAIT_S), waiting.exception(WAIT_S), *blocked):
        assert isinstance(error, WorkerDiedError)
    assert len(blocked) == 1
    with pytest.raises(WorkerDiedError, match="was shut down; create a new pool"):
        pool.submit("a", says("ok"), row())
    pool.close()


@pytest.mark.usefixtures("ray_cluster")
def test_rewards_of_one_name_and_errors_of_the_user() -> None:
    environments = {"sum": "arithmetic", "len": lambda response: len(response)}
    with EnvironmentPool(environments) as pool:
        log = says("46")
        for name, reward in (("sum", 1.0), ("len", 2.0)):
            found = pool.submit(name, log, {"answer": 46}).result(WAIT_S)
            assert total_reward(found.rewards).tolist() == [reward]
        with pytest.raises(MessageLogError, match="column 'answer'"):
            pool.submit("sum", log, {}).result(WAIT_S)
        with pytest.raises(ConfigError, match=r"no environment 'sun'; it has sum, len"):
            pool.submit("sun", log, {})


def test_wrong_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        EnvironmentPool({})
    with pytest.raises(ConfigError, match=r"configs must be for .* 'b'"):
        EnvironmentPool({"a": "arithmetic"}, configs={"b": LaneConfig()})
    with pytest.raises(ConfigError, match="max_pending"):
        LaneConfig(max_pending=0)


def test_a_wrong_conversation_keeps_no_slot() -> None:
    pool = EnvironmentPool.__new__(EnvironmentPool)
    slots = Slots(1)
    pool._lanes = {"a": cast("Any", SimpleNamespace(slots=slots))}
    wrong: Any = ["no message"]
    with pytest.raises(AttributeError):
        pool.submit("a", wrong, {})
    with pytest.raises(AttributeError):
        asyncio.run(pool.step("a", wrong, {}))
    assert slots.taken == 0


def test_slots_go_to_those_who_waited_longest() -> None:
    slots = Slots(2)
    tickets: list[Future[None]] = [slots.take() for _ in range(5)]
    assert [ticket.done() for ticket in tickets] == [True, True, False, False, False]
    slots.abandon(tickets[2])
    slots.give()
    assert [ticket.done() for ticket in tickets[3:]] == [True, False]
    assert slots.taken == slots.peak == 2
    slots.abandon(tickets[3])  # already granted: it passes to the next one
    assert tickets[4].done()
    last = slots.take()
    slots.close(WorkerDiedError("closed"))
    assert isinstance(last.exception(0), WorkerDiedError)
    assert isinstance(slots.take().exception(0), WorkerDiedError)
    slots.give()
    assert slots.taken == 1


def keeping_environment() -> type[EnvironmentInterface[Any]]:
    """Return a class that keeps state in its process for each conversation."""

    class Keeping(EnvironmentInterface[Any]):
        """Reports its state, and the seed that a conversation began with."""

        kept: set[str] = set()  # noqa: RUF012 - one per process, on purpose

        def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
            self.kept.update(row["name"] for row in metadata)
            return [
                {**row, "seed": seed} for row, seed in zip(metadata, seeds, strict=True)
            ]

        def step(
            self, message_log_batch: Sequence[Any], metadata: Sequence[Any]
        ) -> EnvironmentReturn[Any]:
            rows = [{**row, "kept": sorted(self.kept)} for row in metadata]
            return EnvironmentReturn(
                observations=[[]] * len(rows),
                metadata=rows,
                next_stop_strings=[None] * len(rows),
                rewards=[1.0] * len(rows),
                terminateds=[True] * len(rows),
                answers=None,
            )

        def close(self, metadata: Sequence[Any]) -> None:
            self.kept.difference_update(row["name"] for row in metadata)

    return Keeping


def test_conversations_begin_and_end_in_the_processes() -> None:
    log = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with EnvironmentPool({"keeping": keeping_environment()}) as pool:
        [first] = (
            pool.submit("keeping", log, {"name": "a"}, seed=7).result(WAIT_S).metadata
        )
        assert first == {"name": "a", "seed": 7, "kept": ["a"]}
        [second] = pool.submit("keeping", log, first).result(WAIT_S).metadata
        assert second["seed"] == 7
        pool.end("keeping", [second])
        # The next call comes after the end, as a process handles one after another.
        [other] = (
            pool.submit("keeping", log, {"name": "b"}, seed=1).result(WAIT_S).metadata
        )
        assert other["kept"] == ["b"]
    remote = RemoteEnvironment(keeping_environment(), num_workers=2)
    with remote:
        begun = remote.reset([{"name": "a"}, {"name": "b"}, {"name": "c"}], [4, 5, 6])
        assert [row["seed"] for row in begun] == [4, 5, 6]
        remote.close(begun)
        # In both processes, whichever began them.
        found = remote.step([log] * 2, begun[:2]).metadata
        assert [row["kept"] for row in found] == [[], []]
