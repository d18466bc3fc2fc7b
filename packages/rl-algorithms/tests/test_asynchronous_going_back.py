"""A trainer that is lost and returns while answers are in flight."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.workers import TRAINER

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
one_worker = _module.one_worker


def in_step(number, **changes):
    """Return a driver in a step, with every answer requested but pending.

    One prompt per step, one answer per prompt, a checkpoint after each step.
    """
    driver = one_worker(**{"max_staleness": 1, "checkpoint_period": 1, **changes})
    while len(driver.of(act.Train)) <= number:
        # Steps last longer than anything else.
        slow = act.Train if len(driver.asked) > 1 else ()
        driver.answer(next(a for a in driver.asked if not isinstance(a, slow)))
    return driver


def lose(driver):
    incarnation = driver.of(act.StartWorker)[-1].incarnation
    if driver.of(act.StartWorker)[-1].worker != TRAINER:
        incarnation = 0
    return driver.tell(ev.WorkerFailed(driver.now_s, TRAINER, incarnation, "gone"))


def come_back(driver):
    """Have the trainer restore its checkpoint; return the actions."""
    (start,) = [a for a in driver.asked if isinstance(a, act.StartWorker)]
    return driver.answer(start)


def sampled(driver):
    return [sample.prompt.number for sample in driver.of(act.Sample)]


def test_answers_of_restored_weights_are_trained_on_at_once():
    driver = in_step(1)
    before = sampled(driver)
    lose(driver)
    actions = come_back(driver)
    assert [a.groups for a in actions if isinstance(a, act.Train)] == [
        driver.of(act.Train)[1].groups
    ]
    assert not [a for a in actions if isinstance(a, act.Discard | act.Cancel)]
    assert sampled(driver) == before


def in_flight(driver):
    """Return the answer being sampled with the newest weights."""
    driver.answer_all(act.LoadWeights)
    (sample,) = [a for a in driver.asked if isinstance(a, act.Sample)]
    return sample


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_an_answer_in_flight_goes_on_and_is_believed(arrives):
    driver = in_step(1)
    sample = in_flight(driver)
    assert not [a for a in lose(driver) if isinstance(a, act.Cancel)]
    if arrives == "before":
        # While nothing trains; it is scored.
        assert [type(a) for a in driver.answer(sample)] == [act.Score]
    assert not [a for a in come_back(driver) if isinstance(a, act.Cancel)]
    if arrives == "after":
        assert act.Score in [type(a) for a in driver.answer(sample)]
    driver.run()
    assert sampled(driver).count(sample.prompt.number) == 1
    # The second step starts twice.
    steps = driver.trained[:1] + driver.trained[2:]
    assert sorted(number for step in steps for number in step) == [*range(8)]


def test_answers_of_weights_that_are_gone_are_sampled_again():
    driver = in_step(1, checkpoint_period=None)
    first = in_flight(driver)
    saved = driver.schedule.state_dict()
    assert first.prompt.number in [entry["prompt"] for entry in saved["groups"]]
    # It fails, and is sampled again with the weights after the step.
    driver.answer_all(act.Train)
    driver.asked.remove(first)
    driver.tell(ev.AnswerFailed(driver.now_s, first.worker, 0, first.task, "it raised"))
    second = in_flight(driver)
    assert (second.name, second.version) == (first.name, first.version + 1)
    driver.answer(second)
    driver.answer_all(act.Score)
    lose(driver)
    driver.durable = saved
    assert act.Discard(second.task) in come_back(driver)
    driver.answer_all(act.LoadWeights)
    again = driver.of(act.Sample)[-1]
    assert (again.name, again.version) == (first.name, first.version)
    driver.run()
    last = driver.of(act.Train)[-1].step
    assert [n for step in driver.trained[-last:] for n in step] == [*range(1, 8)]


def test_all_comes_again_without_a_checkpoint():
    driver = in_step(2, checkpoint_period=None)
    lose(driver)
    come_back(driver)
    driver.run()
    # Steps 0 and 1 are repeated, and step 2 starts again.
    assert [n for step in driver.trained[3:] for n in step] == [*range(8)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_seeds_of_repeated_steps_are_the_same(number):
    driver = in_step(number, checkpoint_period=None, max_staleness=0)
    lose(driver)
    come_back(driver)
    driver.run()
    names = {}
    for sample in driver.of(act.Sample):
        names.setdefault(sample.prompt.number, set()).add(sample.name)
    assert all(len(found) == 1 for found in names.values())
    assert [n for step in driver.trained[number + 1 :] for n in step] == [*range(8)]


def test_a_late_confirmation_of_lost_weights_is_ignored():
    driver = in_step(1, max_staleness=0)
    driver.answer_all(act.Train)
    driver.answer_all(act.SaveCheckpoint)
    (load,) = [a for a in driver.asked if isinstance(a, act.LoadWeights)]
    lose(driver)
    come_back(driver)
    (again,) = [a for a in driver.asked if isinstance(a, act.LoadWeights) and a != load]
    assert (again.trainer, again.version) == (1, load.version)
    assert driver.answer(load) == []
    assert any(isinstance(a, act.Sample) for a in driver.answer(again))
