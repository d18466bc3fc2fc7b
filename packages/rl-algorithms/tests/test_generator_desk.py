"""The desk that calls a generator, with weights that come while calls are in flight."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest
import torch

from rl_algorithms.rollout.generator_desk import GeneratorDesk
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.errors import WeightSyncError

spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)

DEADLINE_S = 30.0


class Row:
    """A row that notes what it is told."""

    sampling = (False, None)
    opening = None

    def __init__(self):
        self.is_cancelled = False
        self.versions, self.answers = [], []
        self.has_come = threading.Event()

    def note_version(self, version):
        self.versions.append(version)

    def question(self):
        return BatchedDataDict(
            input_ids=torch.tensor([[3, 4]]),
            input_lengths=torch.tensor([2]),
            seeds=torch.tensor([0]),
        )

    def answer(self, output):
        self.answers.append(output)

    def fail(self, error):
        self.answers.append(error)


class Desk:
    """A desk of a generator that takes two calls, of which the first waits.

    The generator's number of a version is ten times the version.
    """

    def __init__(self, versions, in_flight=True):
        self.begun, self.release, self.loaded = (threading.Event() for _ in range(3))
        self.failures, self.calls_at_load = [], []
        self.has_failed = threading.Event()
        self.generation = scripted.TokenGenerator(self._sample, versions)
        self.generation.weight_version = 10
        self.generation.calls_at_once = 2
        self.desk = GeneratorDesk(
            self.generation,
            0,
            self,
            1,
            in_flight=in_flight,
            on_answers=lambda rows, error: [row.has_come.set() for row in rows],
            on_loaded=lambda version: self.loaded.set(),
            on_failure=self._fail,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release.set()
        self.desk.close(DEADLINE_S)

    def _sample(self, call, row, seed):
        if call == 0:
            self.begun.set()
            assert self.release.wait(DEADLINE_S)
        return [3, scripted.EOS]

    def _fail(self, error):
        self.failures.append(error)
        self.has_failed.set()

    def number_of(self, version):
        if version < 0:
            raise WeightSyncError("withdrawn")
        return 10 * version

    def load(self, version):
        self.calls_at_load.append(len(self.desk._in_calls))
        self.generation.weight_version = 10 * version
        return 10 * version

    def ask(self):
        row = Row()
        self.desk.ask([row])
        return row


def test_a_row_is_told_the_versions_of_its_tokens():
    with Desk(lambda call: [10, 20] if call == 0 else 20) as made:
        first = made.ask()
        assert made.begun.wait(DEADLINE_S)
        made.desk.load(2)
        assert made.loaded.wait(DEADLINE_S)
        second = made.ask()
        assert second.has_come.wait(DEADLINE_S)
        made.release.set()
        assert first.has_come.wait(DEADLINE_S)
    assert (first.versions, second.versions) == ([1, 2], [2])
    assert made.calls_at_load == [1]
    assert made.failures == []


def test_a_call_cannot_have_weights_from_before_it():
    with Desk(lambda call: [10, 20]) as made:
        first = made.ask()
        assert made.begun.wait(DEADLINE_S)
        made.desk.load(2)
        assert made.loaded.wait(DEADLINE_S)
        # The first call may have tokens of version 1, and this one may not.
        made.ask()
        assert made.has_failed.wait(DEADLINE_S)
        made.release.set()
        assert first.has_come.wait(DEADLINE_S)
    assert "sampled with weights 10 while it served 20" in str(made.failures[0])
    assert first.versions == [1, 2]


def test_between_answers_weights_wait_for_the_calls_in_flight():
    with Desk(lambda call: 10 if call == 0 else 20, in_flight=False) as made:
        first = made.ask()
        assert made.begun.wait(DEADLINE_S)
        made.desk.load(2)
        second = made.ask()
        made.release.set()
        assert made.loaded.wait(DEADLINE_S)
        assert second.has_come.wait(DEADLINE_S)
    assert (first.versions, second.versions) == ([1], [2])
    assert made.calls_at_load == [0]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_version_that_was_withdrawn_is_not_loaded(in_flight):
    with Desk(lambda call: 10, in_flight=in_flight) as made:
        made.desk.load(-1)
        assert made.has_failed.wait(DEADLINE_S)
        row = made.ask()
        assert made.desk.take_stranded() == [row]
    assert made.generation.weight_version == 10


def test_rows_of_many_replicas_take_a_bounded_number_of_threads():
    before = threading.active_count()
    release, rows = threading.Event(), [Row() for _ in range(1_000)]

    class Replicas:
        weight_version, calls_at_once = 10, 100_000

        def generate(self, data, greedy=False, *, sampling=None):
            assert release.wait(DEADLINE_S)
            return BatchedDataDict(
                output_ids=data["input_ids"],
                weight_version=torch.full((data.size,), 10),
            )

    desk = GeneratorDesk(
        Replicas(),
        0,
        None,
        1,
        on_answers=lambda rows, error: [row.has_come.set() for row in rows],
        on_loaded=lambda version: None,
        on_failure=pytest.fail,
    )
    try:
        for row in rows:
            desk.ask([row])
        assert threading.active_count() - before <= 64
        release.set()
        assert all(row.has_come.wait(DEADLINE_S) for row in rows)
    finally:
        release.set()
        desk.close(DEADLINE_S)
