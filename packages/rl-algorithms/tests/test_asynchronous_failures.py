"""Failing workers and expiring waits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.settings import WaitLimits
from rl_algorithms.asynchronous.workers import TRAINER, Worker

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
ready = _module.ready
one_worker = _module.one_worker

GENERATOR = Worker("generator", 0)


def test_a_generator_that_was_replaced_loads_weights_before_it_samples():
    driver = one_worker()
    driver.tell(ev.WorkerFailed(9.0, GENERATOR, 0, "gone"))
    driver.now_s = 9.0
    driver.answer_all(act.StartWorker)
    assert isinstance(driver.done[-1], act.LoadWeights)
    assert len(driver.of(act.Sample)) == 1
    driver.answer_all(act.LoadWeights)
    again = driver.of(act.Sample)[-1]
    assert again.incarnation == 1
    assert again.name == driver.of(act.Sample)[0].name, "the same seeds"


def test_a_trainer_that_fails_in_the_same_step_is_given_up():
    policy = RestartPolicy(max_restarts=2, backoff_s=0.0)
    # There is a good step between the checkpoint and the bad one each time.
    driver = one_worker(max_staleness=0, checkpoint_period=2, restarts=policy)
    for _ in range(200):
        if driver.schedule.end is not None:
            break
        action = driver.asked[0]
        if isinstance(action, act.Train) and action.step == 3:
            driver.now_s += 1.0
            event = ev.WorkerFailed(driver.now_s, TRAINER, action.incarnation, "memory")
            driver.asked.remove(action)
            driver.tell(event)
        else:
            driver.answer(action)
    assert [start.incarnation for start in driver.of(act.StartWorker)
            if start.worker == TRAINER] == [0, 1, 2]  # fmt: skip
    assert driver.schedule.end is not None
    assert "trainer failed 3 times in a row" in driver.schedule.end.reason


def test_overdue_work_is_done_elsewhere_and_a_silent_worker_ended():
    driver = ready(num_generations_per_prompt=1, num_prompts_per_step=1)
    silent, *_ = driver.of(act.Sample)
    deadline_s = driver.schedule.next_deadline_s()
    assert deadline_s is not None
    # The other generator reports in time.
    for sample in [a for a in driver.asked if isinstance(a, act.Sample)]:
        if sample.worker != silent.worker:
            driver.answer(sample)
    driver.answer_all(act.Score)
    driver.tell(ev.Tick(deadline_s))
    assert [stop.worker for stop in driver.of(act.StopWorker)] == [silent.worker]
    again = [s for s in driver.of(act.Sample) if s.name == silent.name]
    assert len(again) == 2
    assert again[1].worker != silent.worker


def test_a_run_without_progress_says_what_it_waits_for():
    limits = WaitLimits(answer_s=50.0, progress_s=60.0)
    driver = one_worker(limits=limits, max_staleness=0, max_attempts=9)
    driver.tell(ev.Tick(60.0))
    assert driver.schedule.end == act.Fail(
        "no new step for 60 s: step 0 has 0 of 1 finished groups; prompt 0 has 1 "
        "unsent; generator 0 is starting"
    )


def test_nothing_is_asked_for_after_the_end():
    limits = WaitLimits(start_s=60.0, progress_s=60.0)
    driver = Driver(settings(limits=limits))
    driver.begin()
    (end,) = driver.tell(ev.Tick(60.0))
    assert isinstance(end, act.Fail)
    assert "the trainer is starting" in end.reason


def test_a_run_without_workers_fails():
    driver = Driver(settings())
    driver.begin()
    while driver.schedule.end is None:
        deadline_s = driver.schedule.next_deadline_s()
        assert deadline_s is not None
        driver.tell(ev.Tick(deadline_s))
    assert isinstance(driver.schedule.end, act.Fail)
    assert "did not start within" in driver.schedule.end.reason
    assert driver.tell(ev.Tick(1e9)) == []
    assert driver.schedule.next_deadline_s() is None


def test_the_trainer_may_have_a_policy_of_its_own():
    never, once = RestartPolicy(max_restarts=0), RestartPolicy(max_restarts=1)
    driver = one_worker(restarts=never, trainer_restarts=once, max_staleness=0)
    driver.tell(ev.WorkerFailed(driver.now_s, TRAINER, 0, "gone"))
    driver.answer_all(act.StartWorker)
    driver.answer_all(act.LoadWeights)
    assert driver.of(act.Sample)[-1].name == driver.of(act.Sample)[0].name
    driver.tell(ev.WorkerFailed(driver.now_s, TRAINER, 1, "gone again"))
    assert "more than max_restarts=1 allows" in driver.schedule.end.reason
    driver = one_worker(restarts=never, trainer_restarts=once)
    driver.tell(ev.WorkerFailed(driver.now_s, GENERATOR, 0, "gone"))
    assert "more than max_restarts=0 allows" in driver.schedule.end.reason
