"""Many conversations that a worker judges at the same time."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import torch
from ray import cloudpickle

from rl_distributed.errors import ConfigError, DeadlineExceededError, WorkerMethodError
from rl_envs import EnvironmentContractError, RemoteEnvironment, ToolEnvironment
from rl_envs.call_lock import CallLock
from rl_envs.environment_host import EnvironmentHost
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_envs.registry import EnvironmentSpec
from rl_envs.row_jobs import RowJob, row_host_of
from rl_envs.rows_in_flight import RowsInFlight
from rl_envs.tools.calls import ToolCall
from rl_envs.tools.environment import ToolLimits

DEADLINE_S = 60.0


def job(number, text="go", **columns):
    log = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    return RowJob(number, log, columns)


def verdict(reward, *, name=None, rows=1):
    rewards = torch.full((rows,), float(reward))
    return EnvironmentReturn(
        [{"role": "user", "content": "next"}] * rows,
        [{}] * rows,
        [None] * rows,
        rewards if name is None else {name: rewards},
        torch.ones(rows, dtype=torch.bool),
        None,
    )


def poll_all(poll, begin, count):
    """Poll until so many jobs have ended; return verdicts and failures by number."""
    found, failures = {}, {}
    for _ in range(1_000):
        reply = poll(begin, 1.0)
        begin = []
        for numbers, joined in reply.verdicts:
            rewards = joined.rewards
            if isinstance(rewards, dict):
                (rewards,) = rewards.values()
            found |= dict(zip(numbers, rewards.tolist(), strict=True))
        failures |= {each.number: each.error for each in reply.failures}
        if len(found) + len(failures) == count:
            return found, failures
    raise AssertionError((found, failures))


def test_all_are_judged_at_the_same_time():
    meeting = threading.Barrier(40)

    def step(job):
        meeting.wait(DEADLINE_S)
        return verdict(job.number)

    rows = RowsInFlight(step)
    found, failures = poll_all(rows.poll, [job(n) for n in range(40)], 40)
    assert found == {n: float(n) for n in range(40)}
    assert not failures
    assert not rows.count


def test_a_slow_one_holds_up_nobody_else():
    release = threading.Event()

    def step(job):
        assert job.number or release.wait(DEADLINE_S)
        return verdict(job.number)

    rows = RowsInFlight(step)
    found, _ = poll_all(rows.poll, [job(n) for n in range(5)], 4)
    assert sorted(found) == [1, 2, 3, 4]
    assert rows.late(DEADLINE_S) == []
    assert rows.late(-1.0) == [0]
    release.set()
    assert poll_all(rows.poll, [], 1)[0] == {0: 0.0}


def test_what_fails_fails_alone():
    def step(job):
        match job.number:
            case 1:
                raise ZeroDivisionError("reward of nothing")
            case 2:
                return verdict(1.0, rows=2)
            case 3:
                raise ConfigError("no key")
            case 4:
                return verdict(4.0, name="reward/other")
        return verdict(job.number)

    rows = RowsInFlight(step)
    found, failures = poll_all(rows.poll, [job(n) for n in range(6)], 6)
    assert found == {0: 0.0, 4: 4.0, 5: 5.0}
    assert {number: type(error) for number, error in failures.items()} == {
        1: WorkerMethodError,
        2: EnvironmentContractError,
        3: ConfigError,
    }
    assert "ZeroDivisionError: reward of nothing" in str(failures[1])
    assert "in step" in str(failures[1])


class Counting(EnvironmentInterface):
    """A judge that notes how many of its calls run at a time."""

    def __init__(self):
        self.running = self.most = 0

    def step(self, message_log_batch, metadata):
        self.running += 1
        self.most = max(self.most, self.running)
        size = len(metadata)
        # Other threads get their turn here.
        threading.Event().wait(0.001)
        self.running -= 1
        return verdict(0.5, rows=size)


def waiting_tools(limits=None, judge=None):
    async def wait(count: int) -> str:
        """Wait for the calls of as many conversations."""
        async with asyncio.timeout(DEADLINE_S):
            arrived.append(count)
            while len(arrived) < count:
                await asyncio.sleep(0.001)
        return "all are there"

    arrived = []
    return ToolEnvironment(
        [wait],
        judge or (lambda prompt, response: 0.5),
        parser=lambda text: [ToolCall("wait", {"count": 12})] if text == "go" else [],
        limits=limits or ToolLimits(max_conversations=12),
    )


def test_tools_of_many_conversations_run_at_the_same_time():
    judge = Counting()
    made = waiting_tools(judge=judge)
    assert made.calls_at_once == 12
    assert ToolEnvironment([len_of], judge).calls_at_once == 1

    def step(job):
        return made.step([job.log], [job.metadata])

    rows = RowsInFlight(step)
    numbers = []
    begin = [job(n) for n in range(12)]
    while len(numbers) < 12:
        reply = rows.poll(begin, DEADLINE_S)
        assert not reply.failures
        begin = []
        for done, joined in reply.verdicts:
            numbers += done
            assert not joined.terminateds.any()
            assert {said[0]["content"] for said in joined.observations} == {
                "all are there"
            }
    assert sorted(numbers) == list(range(12))
    # Its judge is not asked from two threads.
    assert judge.most == 1
    judge.most, judge.calls_at_once = 0, 3
    again = cloudpickle.loads(cloudpickle.dumps(waiting_tools(judge=judge)))
    assert again._judging._num_calls == 3


def len_of(text: str) -> int:
    """Return the length of a text."""
    return len(text)


def test_a_lock_lets_as_many_in_as_it_says():
    lock = CallLock(2)
    inside, leave = threading.Semaphore(0), threading.Event()

    def call():
        with lock:
            inside.release()
            assert leave.wait(DEADLINE_S)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=DEADLINE_S)
    assert inside.acquire(timeout=DEADLINE_S)
    assert not inside.acquire(timeout=0.05)
    leave.set()
    assert inside.acquire(timeout=DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)


def test_the_host_begins_conversations_and_reports_late_ones():
    class World(EnvironmentInterface):
        calls_at_once = 4

        def __init__(self):
            self.release = threading.Event()

        def reset(self, metadata, seeds):
            return [
                {**row, "seed": seed} for row, seed in zip(metadata, seeds, strict=True)
            ]

        def step(self, message_log_batch, metadata):
            (row,) = metadata
            if row.get("hangs"):
                self.release.wait(DEADLINE_S)
            return verdict(row.get("seed", -1))

    host = EnvironmentHost(cloudpickle.dumps(EnvironmentSpec.of(World)))
    assert host.abilities().calls_at_once == 4

    def poll(begin, wait_s):
        return host.poll_rows(begin, wait_s, 0.2)

    begun = RowJob(0, job(0).log, {}, seed=7)
    found, failures = poll_all(poll, [begun, job(1), job(2, hangs=True)], 3)
    host._environment.release.set()
    assert found == {0: 7.0, 1: -1.0}
    assert isinstance(failures[2], DeadlineExceededError)
    assert str(failures[2]) == "no verdict in 0.2 s"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
class TestRemote:
    def test_workers_have_many_conversations_in_flight(self):
        limits = ToolLimits(max_conversations=12)
        with RemoteEnvironment(waiting_tools(limits), num_workers=1) as environment:
            assert row_host_of(environment) is environment
            assert environment.num_row_workers == environment.calls_at_once == 1
            assert environment.rows_per_worker == 12
            found, failures = poll_all(
                environment.poll_rows, [job(n) for n in range(12)], 12
            )
        assert found == dict.fromkeys(range(12), 0.0)
        assert not failures

    def test_others_are_judged_one_call_after_another(self):
        with RemoteEnvironment(lambda prompt, response: 1.0) as environment:
            assert row_host_of(environment) is None
        assert row_host_of(Counting()) is None

    def test_a_process_that_is_replaced_has_another_name(self):
        class Dying(EnvironmentInterface):
            calls_at_once = 4

            def step(self, message_log_batch, metadata):
                if metadata[0].get("dies"):
                    # After the reply to the poll that began it.
                    threading.Event().wait(0.5)
                    os._exit(3)
                if metadata[0].get("hangs"):
                    threading.Event().wait(DEADLINE_S)
                return verdict(1.0)

        with RemoteEnvironment(Dying, deadline_s=1.5) as environment:
            names = [environment.poll_rows([], 0.0).process]
            assert poll_all(environment.poll_rows, [job(0)], 1)[0] == {0: 1.0}
            environment.poll_rows([job(1, dies=True)], 0.0)
            # The death shows in this poll or the next; its jobs are gone.
            for _ in range(100):
                names.append(environment.poll_rows([], 0.1).process)
                if names[-1] != names[0]:
                    break
            assert len(set(names)) == 2
            _, failures = poll_all(environment.poll_rows, [job(2, hangs=True)], 1)
            assert isinstance(failures[2], DeadlineExceededError)
            # The process that hangs is replaced.
            assert environment.poll_rows([], 0.0).process not in names
            assert poll_all(environment.poll_rows, [job(3)], 1)[0] == {3: 1.0}
