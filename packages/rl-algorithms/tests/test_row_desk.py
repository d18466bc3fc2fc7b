"""Many conversations in flight on few workers, which are objects of this process."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_algorithms.rollout.judge import Judge
from rl_algorithms.rollout.result import Outcome
from rl_algorithms.rollout.worker_crew import WorkerCrew
from rl_algorithms.trainers.ahead.jobs import Scoring
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.row_desk import RowDesk
from rl_algorithms.trainers.ahead.sampler import AheadSampler
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig
from rl_distributed.errors import ConfigError, WorkerDiedError
from rl_envs.rows_in_flight import RowsInFlight

spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)

DEADLINE_S = 30.0


class Workers(scripted.Judge):
    """An environment whose workers judge many conversations at a time.

    `loses(poll)` says whether the process of a worker is replaced after its n-th poll.
    """

    def __init__(self, judge, count=2, most=500, loses=lambda worker, poll: False):
        super().__init__(judge)
        self.num_row_workers, self.rows_per_worker = count, most
        self.loses, self.num_polls = loses, [0] * count
        self.workers = [self.process() for _ in range(count)]
        self.most_running = 0

    def process(self):
        return RowsInFlight(lambda job: self.step([job.log], [job.metadata]))

    def poll_rows(self, begin, wait_s, worker=0):
        rows = self.workers[worker]
        poll = rows.poll(begin, wait_s)
        self.most_running = max(self.most_running, rows.count)
        self.num_polls[worker] += 1
        if self.loses(worker, self.num_polls[worker]):
            self.workers[worker] = self.process()
            return self.workers[worker].poll([], 0.0)
        return poll


class Desk:
    """A desk, with the verdicts that came."""

    def __init__(self, workers):
        self.changed = threading.Condition()
        self.verdicts, self.failures = {}, []
        self.desk = RowDesk(Judge(workers), workers, self.take, self.fail)

    def take(self, scorings, verdict):
        with self.changed:
            for scoring, row in zip(scorings, verdict.rows(), strict=True):
                assert scoring.job.name not in self.verdicts
                self.verdicts[scoring.job.name] = row
            self.changed.notify_all()

    def fail(self, error):
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()

    def ask(self, count):
        self.desk.ask([Scoring(job(name), None) for name in range(count)])

    def wait(self, holds):
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self), DEADLINE_S), self.verdicts

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.desk.close(DEADLINE_S)


def job(name):
    log = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    conversation = SimpleNamespace(log=log, metadata={"name": name})
    return SimpleNamespace(
        name=name, conversation=conversation, is_cancelled=False, begin=lambda: None
    )


def test_a_thousand_in_flight_take_a_thread_per_worker():
    arrived, release = threading.Semaphore(0), threading.Event()

    def judge(log, info):
        arrived.release()
        assert release.wait(DEADLINE_S)
        return float(info["name"]), True, ""

    earlier = set(threading.enumerate())
    workers = Workers(judge)
    with Desk(workers) as run:
        run.ask(1_000)
        for _ in range(1_000):
            assert arrived.acquire(timeout=DEADLINE_S)
        assert not run.desk.has_room
        # Threads of earlier tests may end meanwhile.
        new = set(threading.enumerate()) - earlier
        names = sorted(thread.name.rstrip("-0123456789") for thread in new)
        # Those of the environment are in its processes.
        own = [name for name in names if name != "row"]
        assert own == ["ahead-score", "worker-crew", "worker-crew"]
        release.set()
        run.wait(lambda run: len(run.verdicts) == 1_000)
        rewards = {n: v.rewards.item() for n, v in run.verdicts.items()}
        assert rewards == {name: float(name) for name in range(1_000)}
        assert run.desk.has_room
    assert workers.most_running <= 500
    assert not run.failures


def test_no_worker_gets_more_than_it_takes():
    workers = Workers(lambda log, info: (1.0, True, ""), most=3)
    with Desk(workers) as run:
        run.ask(50)
        run.wait(lambda run: len(run.verdicts) == 50)
    assert workers.most_running <= 3


def test_what_a_lost_worker_had_goes_to_another():
    # The first process of each worker is replaced as soon as it has jobs.
    workers = Workers(
        lambda log, info: (1.0, True, ""), loses=lambda worker, poll: poll == 2
    )
    with Desk(workers) as run:
        run.ask(40)
        run.wait(lambda run: len(run.verdicts) == 40)
    assert {verdict.rewards.item() for verdict in run.verdicts.values()} == {1.0}


def test_what_loses_each_worker_fails():
    workers = Workers(
        lambda log, info: (1.0, True, ""), loses=lambda worker, poll: poll > 1
    )
    with Desk(workers) as run:
        run.ask(2)
        run.wait(lambda run: len(run.verdicts) == 2)
    for verdict in run.verdicts.values():
        assert verdict.outcome.tolist() == [int(Outcome.INFRASTRUCTURE_ERROR)]
        assert "was replaced while it ran jobs" in str(verdict.errors[0])
        assert isinstance(verdict.errors[0], WorkerDiedError)


def test_what_fails_fails_alone_and_a_mistake_ends_the_run():
    def judge(log, info):
        if info["name"] == 1:
            raise ZeroDivisionError("reward of nothing")
        if info["name"] == 2:
            raise ConfigError("no key")
        return 1.0, True, ""

    with Desk(Workers(judge)) as run:
        run.ask(4)
        run.wait(lambda run: len(run.verdicts) == 3 and run.failures)
    assert sorted(run.verdicts) == [0, 1, 3]
    assert "ZeroDivisionError: reward of nothing" in str(run.verdicts[1].errors[0])
    assert [str(error) for error in run.failures] == ["no key"]


def test_verdicts_of_a_call_are_passed_on_together():
    sizes = []

    class Gathering(Workers):
        """Gives back verdicts only once there are six."""

        held = ()

        def poll_rows(self, begin, wait_s, worker=0):
            poll = super().poll_rows(begin, wait_s, worker)
            self.held = (*self.held, *poll.verdicts)
            is_whole = sum(len(numbers) for numbers, _ in self.held) == 6
            return replace(poll, verdicts=list(self.held) if is_whole else [])

    class Counting(Desk):
        def take(self, scorings, verdict):
            sizes.append(len(scorings))
            super().take(scorings, verdict)

    workers = Gathering(lambda log, info: (float(info["name"]), True, ""), count=1)
    with Counting(workers) as desk:
        desk.ask(6)
        desk.wait(lambda d: len(d.verdicts) == 6)
        for name, verdict in desk.verdicts.items():
            assert verdict.rewards.tolist() == [float(name)]
        assert sizes == [6]


def test_an_error_in_what_follows_a_verdict_ends_the_run():
    class Strict(Desk):
        def take(self, scorings, verdict):
            # As where the chat template rewrites earlier messages.
            raise RolloutError("the next turn cannot be written")

    with Strict(Workers(lambda log, info: (1.0, True, ""), count=1)) as desk:
        desk.ask(1)
        desk.wait(lambda d: d.failures)
    assert [str(error) for error in desk.failures] == [
        "the next turn cannot be written"
    ]


def test_results_count_whichever_worker_reports_them():
    """A worker without a node has its jobs run by another one."""
    begun, both = {}, threading.Event()
    found, done = [], threading.Semaphore(0)

    def poll(begin, cancel, wait_s, worker):
        if not begin:
            return SimpleNamespace(results=[], process="one")
        (begun[worker],) = begin
        if len(begun) == 2:
            both.set()
        assert both.wait(DEADLINE_S)
        return SimpleNamespace(results=[begun[1 - worker]], process="one")

    def note(result):
        found.append(result.number)
        done.release()

    crew = WorkerCrew(poll, 2, 1, pytest.fail)
    try:
        for number in range(2):
            crew.begin(SimpleNamespace(number=number), note)
        for _ in range(2):
            assert done.acquire(timeout=DEADLINE_S)
    finally:
        crew.close()
    assert sorted(found) == [0, 1]


class Sync:
    """Publishes and loads numbers instead of weights."""

    def __init__(self, generation):
        self.generation = generation

    def publish(self, number):
        return [number]

    def load(self, published):
        (self.generation.weight_version,) = published


def test_rows_are_those_of_a_rollout(tmp_path):
    tokenizer = scripted.ambiguous_tokenizer()

    def judge(log, info):
        return float(len(log)), log[0]["content"] == "a", "cde"

    def sample(call, row, seed):
        return [3 + seed % 7, scripted.EOS]

    generation = scripted.TokenGenerator(sample, lambda call: 0)
    config = RolloutConfig(max_turns=3, max_total_sequence_length=32)
    workers = Workers(judge)
    engine = RolloutEngine(generation, workers, tokenizer, config)
    rows = process_prompts([{"prompt": prompt} for prompt in "ab"], tokenizer)
    loader = BatchedDataLoader(
        rows,
        2,
        collate_fn=lambda rows: rl_collate_fn(
            rows, pad_token_id=tokenizer.pad_token_id
        ),
    )
    sampler = AheadSampler(
        AsynchronousConfig(max_staleness=0),
        RunShape(
            num_prompts=2,
            num_generations=2,
            max_num_steps=1,
            max_num_epochs=None,
            first_step=0,
            max_turns=3,
            max_attempts=1,
            seed=7,
        ),
        PromptSource(loader, 2),
        engine,
        generation,
        Sync(generation),
        calls_at_once=1,
        pad_token_id=tokenizer.pad_token_id,
        check=lambda: None,
        saved=None,
        log_folder=tmp_path,
    )
    try:
        result, _ = sampler.next_step()
        expected = engine.run(loader.batch_at(0, [0, 1]), num_generations=2, seed=7)
    finally:
        sampler.close()
    assert sum(workers.num_polls) > 0
    assert result.message_logs == expected.message_logs
    assert result.metrics == expected.metrics
    for name, column in expected.rows.items():
        found = result.rows[name]
        if isinstance(column, torch.Tensor):
            column = column[:, : found.shape[1]] if column.dim() == 2 else column
            assert torch.equal(found, column), name
        else:
            assert found == column, name
