"""Steps, checkpoints and going back."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.settings import WaitLimits
from rl_algorithms.asynchronous.workers import TRAINER

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
Driver = _module.Driver
settings = _module.settings
one_worker = _module.one_worker
finish = _module.finish


def test_a_step_waits_for_a_group_that_would_be_too_old_without_it():
    driver = one_worker(max_staleness=1, answers_per_generator=4)
    slow, other = driver.of(act.Sample)
    finish(driver, other)
    # Prompt 0 fits into step 1, so step 0 starts without it.
    assert driver.trained == [[1]]
    driver.answer_all(act.Train)
    assert driver.of(act.Train)[-1].step == 0, "step 1 waits for prompt 0"
    finish(driver, slow)
    assert driver.trained == [[1], [0]]
    assert driver.of(act.DropGroup) == []


def test_a_dead_trainer_goes_back_to_the_checkpoint():
    driver = one_worker(max_staleness=0, checkpoint_period=1, prompts_per_epoch=4)
    while not driver.of(act.SaveCheckpoint):
        driver.answer(driver.asked[0])
    driver.answer_all(act.SaveCheckpoint)
    while len(driver.of(act.SaveCheckpoint)) < 2:
        driver.answer(driver.asked[0])
    # Step 1 is done but not saved: prompt 1 is trained on again, with new weights.
    driver.tell(ev.WorkerFailed(driver.now_s, TRAINER, 0, "rank 3 is gone"))
    driver.run()
    assert driver.trained == [[0], [1], [1], [2], [3]]
    loads = [(load.trainer, load.version) for load in driver.of(act.LoadWeights)]
    assert all(a < b for a, b in pairwise(loads))


def test_a_stop_saves_and_ends_after_the_step_under_way():
    driver = one_worker(max_staleness=1)
    while not driver.of(act.Train):
        driver.answer(driver.asked[0])
    assert driver.tell(ev.StopRequested(driver.now_s, "enough")) == []
    driver.answer_all(act.Train)
    driver.answer_all(act.SaveCheckpoint)
    assert driver.schedule.end == act.Finish(1, "enough")
    assert driver.trained == [[0]]


def test_a_paused_run_expects_no_step_however_long():
    limits = WaitLimits(progress_s=60.0, step_s=60.0)
    driver = one_worker(max_staleness=1, limits=limits)
    while not driver.of(act.Train):
        driver.answer(driver.asked[0])
    driver.tell(ev.RunPaused(driver.now_s))
    # Answers in flight continue, and fill the places of later steps.
    while any(isinstance(asked, act.Sample | act.Score) for asked in driver.asked):
        asked = next(a for a in driver.asked if isinstance(a, act.Sample | act.Score))
        driver.answer(asked)
    driver.now_s += 100_000.0
    assert driver.tell(ev.Tick(driver.now_s)) == []
    assert driver.schedule.end is None
    driver.tell(ev.RunResumed(driver.now_s))
    driver.now_s += 59.0
    driver.tell(ev.Tick(driver.now_s))
    assert driver.schedule.end is None
    # From here on as if the step had just begun.
    driver.now_s += 2.0
    driver.tell(ev.Tick(driver.now_s))
    assert isinstance(driver.schedule.end, act.Fail)


def test_max_num_steps_ends_the_run_and_nothing_is_sampled_for_later():
    driver = Driver(settings(max_num_steps=2, max_staleness=3)).run()
    assert driver.trained == [[0, 1], [2, 3]]
    assert len(driver.of(act.Sample)) == 8
    assert driver.schedule.end == act.Finish(2, "max_num_steps (2) reached")


def test_progress_is_expected_from_the_last_new_step_on():
    limits = WaitLimits(progress_s=60.0)
    driver = one_worker(limits=limits, max_staleness=0)
    while len(driver.of(act.Train)) < 2:
        driver.answer(driver.asked[0])
    trained_s = next(
        e.event.at_s for e in driver.log.entries if isinstance(e.event, ev.StepTrained)
    )
    assert driver.schedule.next_deadline_s() == trained_s + 60.0
    driver.tell(ev.Tick(trained_s + 59.0))
    assert driver.schedule.end is None
    driver.tell(ev.Tick(trained_s + 60.0))
    assert driver.schedule.end == act.Fail(
        "no new step for 60 s: the trainer is working on step 1"
    )
