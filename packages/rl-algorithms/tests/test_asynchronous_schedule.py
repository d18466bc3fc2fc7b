"""What the schedule decides, from events to actions."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.settings import WaitLimits
from rl_algorithms.asynchronous.workers import TRAINER, Worker
from rl_algorithms.errors import ScheduleError
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.seeds import row_seeds

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
Driver, settings = _module.Driver, _module.settings

GENERATOR = Worker("generator", 0)
ENVIRONMENT = Worker("environment", 0)


def ready(**changes):
    """Return a driver whose workers have started and whose generators have weights."""
    driver = Driver(settings(**changes))
    driver.begin()
    driver.answer_all(act.StartWorker)
    driver.answer_all(act.LoadWeights)
    return driver


def one_worker(**changes):
    """Return the same with one generator that samples one answer at a time."""
    small = {
        "num_generators": 1,
        "num_generations_per_prompt": 1,
        "answers_per_generator": 1,
    }
    return ready(**{**small, "num_prompts_per_step": 1, **changes})


def finish(driver, sample):
    """Have an answer sampled and scored."""
    driver.answer(sample)
    driver.answer_all(act.Score)


def test_without_staleness_the_order_is_that_of_a_synchronous_run():
    driver = Driver(settings(max_staleness=0)).run()
    assert driver.trained == [[0, 1], [2, 3], [4, 5], [6, 7]]
    step = -1
    for action in driver.done:
        match action:
            case act.Sample():
                assert action.version == step + 1 == action.name.step
            case act.Train():
                assert action.step == step + 1
                step = action.step
    assert len(driver.of(act.Sample)) == 16
    assert isinstance(driver.schedule.end, act.Finish)


@pytest.mark.parametrize("turn", [0, 3])
def test_seeds_are_those_of_a_synchronous_run(turn):
    driver = Driver(settings(max_staleness=1)).run()
    for step in range(4):
        names = sorted(s.name for s in driver.of(act.Sample) if s.name.step == step)
        wanted = RowNames.of_groups(2, 2).seeds(5, step, 0, turn).tolist()
        for name, seed in zip(names, wanted, strict=True):
            sample = np.array([name.sample + name.attempt * 2**32])
            prompt = np.array([name.prompt])
            assert row_seeds(5, name.step, prompt, sample, turn).tolist() == [seed]


def test_sampling_goes_on_while_the_trainer_works():
    driver = ready(max_staleness=1, answers_per_generator=8)
    assert [s.prompt.number for s in driver.of(act.Sample)][::2] == [0, 1, 2, 3]
    while not driver.of(act.Train):
        driver.answer(next(a for a in driver.asked if isinstance(a, act.Sample)))
        driver.answer_all(act.Score)
    driver.answer_all(act.Sample)
    # Step 1 can use two more groups of version 0, and no further one.
    assert {s.prompt.number for s in driver.of(act.Sample)} == {0, 1, 2, 3}
    assert {s.version for s in driver.of(act.Sample)} == {0}


@pytest.mark.parametrize("staleness", [0, 1, 3])
@hypothesis_settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_in_any_order_each_prompt_is_trained_on_once_and_in_time(staleness, data):
    driver = Driver(
        settings(
            max_staleness=staleness,
            num_prompts_per_step=data.draw(st.integers(1, 3)),
            prompts_per_epoch=data.draw(st.integers(1, 6)),
            max_num_epochs=2,
            weight_updates=data.draw(
                st.sampled_from(["between_answers", "between_tokens"])
            ),
            checkpoint_period=2,
        )
    )
    driver.run(lambda asked: data.draw(st.integers(0, len(asked) - 1)))
    trained = sorted(number for step in driver.trained for number in step)
    assert trained == list(range(driver.schedule.settings.prompts_per_epoch * 2))
    oldest = {sample.task: sample.version for sample in driver.of(act.Sample)}
    for train in driver.of(act.Train):
        for group in train.groups:
            assert len(group.rows) == 2
            ages = [train.step - oldest[task] for task in group.rows]
            assert min(ages) >= 0
            assert max(ages) <= staleness
    assert driver.of(act.DropGroup) == []


def test_a_step_waits_for_a_group_that_would_be_too_old_without_it():
    driver = one_worker(max_staleness=1, answers_per_generator=4)
    slow, other = driver.of(act.Sample)
    finish(driver, other)
    # Prompt 0 fits into step 1, so step 0 begins without it.
    assert driver.trained == [[1]]
    driver.answer_all(act.Train)
    assert driver.of(act.Train)[-1].step == 0, "step 1 waits for prompt 0"
    finish(driver, slow)
    assert driver.trained == [[1], [0]]
    assert driver.of(act.DropGroup) == []


def test_generators_take_new_weights_between_answers():
    driver = one_worker(max_staleness=2, answers_per_generator=3)
    first, *others = driver.of(act.Sample)
    finish(driver, first)
    driver.answer_all(act.Train)
    assert len(driver.of(act.LoadWeights)) == 1, "two answers are under way"
    for sample in others:
        finish(driver, sample)
    assert [load.version for load in driver.of(act.LoadWeights)] == [0, 1]


def test_generators_take_new_weights_between_tokens():
    driver = one_worker(
        max_staleness=1, answers_per_generator=2, weight_updates="between_tokens"
    )
    first, second = driver.of(act.Sample)
    finish(driver, first)
    driver.answer_all(act.Train)
    (load,) = [a for a in driver.asked if isinstance(a, act.LoadWeights)]
    driver.answer(load)
    driver.answer(second, oldest_version=0, newest_version=1)
    driver.answer_all(act.Score)
    # Its age counts from its oldest token: version 0 is one step old in step 1.
    assert driver.trained == [[0], [1]]


def test_an_answer_with_other_weights_is_refused_and_its_generator_ended():
    driver = one_worker()
    driver.answer(driver.of(act.Sample)[0], oldest_version=5, newest_version=5)
    (stop,) = driver.of(act.StopWorker)
    assert "versions 5 to 5, and had confirmed 0" in stop.reason
    assert act.Discard(0) in driver.done


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


def test_an_answer_that_comes_after_its_retry_is_discarded():
    driver = one_worker()
    (first,) = driver.of(act.Sample)
    driver.tell(ev.WorkerFailed(9.0, GENERATOR, 0, "gone"))
    assert driver.tell(ev.Answered(10.0, GENERATOR, 0, first.task, 0, 0, 1)) == [
        act.Discard(first.task)
    ]


def test_an_answer_that_comes_twice_is_kept_once():
    driver = one_worker()
    (sample,) = driver.of(act.Sample)
    answered = driver.event_for(sample)
    driver.answer(sample)
    assert driver.tell(ev.Answered(*_values(answered, at_s=9.0))) == []


def _values(event, **changes):
    names = type(event).__dataclass_fields__
    return [changes.get(name, getattr(event, name)) for name in names]


def test_what_cannot_be_scored_is_sampled_with_another_seed_and_then_dropped():
    driver = one_worker(max_attempts=2, max_staleness=0)
    for attempt in range(2):
        sample = driver.of(act.Sample)[-1]
        assert sample.name == (0, 0, 0, attempt)
        driver.answer(sample)
        score = driver.of(act.Score)[-1]
        driver.answer(score, reward=float("nan"))
    (drop,) = driver.of(act.DropGroup)
    assert drop.prompt.number == 0
    assert drop.attempts == 2
    assert drop.reason == "its reward is nan"
    assert driver.of(act.Sample)[-1].prompt.number == 1, "another takes its place"


def test_scoring_is_repeated_where_an_environment_dies():
    driver = one_worker(num_environments=2, max_staleness=0)
    driver.answer(driver.of(act.Sample)[0])
    (score,) = driver.of(act.Score)
    driver.tell(ev.WorkerFailed(9.0, score.worker, 0, "gone"))
    again = driver.of(act.Score)[-1]
    assert again.rows == score.rows
    assert again.worker != score.worker
    assert len(driver.of(act.Sample)) == 1


def test_too_many_drops_in_a_row_end_the_run():
    driver = one_worker(max_attempts=1, max_drops_in_row=2)
    while driver.schedule.end is None:
        sample = driver.of(act.Sample)[-1]
        driver.asked.remove(sample)
        driver.now_s += 1.0
        driver.tell(ev.AnswerFailed(driver.now_s, GENERATOR, 0, sample.task, "odd"))
    assert isinstance(driver.schedule.end, act.Fail)
    assert "max_drops_in_row=2" in driver.schedule.end.reason
    assert driver.schedule.end.reason.endswith("because: odd")


def test_a_dead_trainer_goes_back_to_the_checkpoint():
    driver = one_worker(max_staleness=0, checkpoint_period=1, prompts_per_epoch=4)
    while not driver.of(act.SaveCheckpoint):
        driver.answer(driver.asked[0])
    driver.answer_all(act.SaveCheckpoint)
    while len(driver.of(act.SaveCheckpoint)) < 2:
        driver.answer(driver.asked[0])
    # Step 1 is done and not saved: prompt 1 is trained on again, with new weights.
    driver.tell(ev.WorkerFailed(driver.now_s, TRAINER, 0, "rank 3 is gone"))
    driver.run()
    assert driver.trained == [[0], [1], [1], [2], [3]]
    loads = [(load.trainer, load.version) for load in driver.of(act.LoadWeights)]
    assert all(a < b for a, b in pairwise(loads))


def test_a_trainer_that_fails_in_the_same_step_is_given_up():
    policy = RestartPolicy(max_restarts=2, backoff_s=0.0)
    driver = one_worker(max_staleness=0, checkpoint_period=1, restarts=policy)
    while driver.schedule.end is None:
        action = driver.asked[0]
        if isinstance(action, act.Train) and action.step == 2:
            driver.now_s += 1.0
            event = ev.WorkerFailed(driver.now_s, TRAINER, action.incarnation, "memory")
            driver.asked.remove(action)
            driver.tell(event)
        else:
            driver.answer(action)
    assert [start.incarnation for start in driver.of(act.StartWorker)
            if start.worker == TRAINER] == [0, 1, 2]  # fmt: skip
    assert "trainer failed 3 times in a row" in driver.schedule.end.reason


def test_a_stop_saves_and_ends_after_the_step_under_way():
    driver = one_worker(max_staleness=1)
    while not driver.of(act.Train):
        driver.answer(driver.asked[0])
    assert driver.tell(ev.StopRequested(driver.now_s, "enough")) == []
    driver.answer_all(act.Train)
    driver.answer_all(act.SaveCheckpoint)
    assert driver.schedule.end == act.Finish(1, "enough")
    assert driver.trained == [[0]]


def test_max_num_steps_ends_the_run_and_nothing_is_sampled_for_later():
    driver = Driver(settings(max_num_steps=2, max_staleness=3)).run()
    assert driver.trained == [[0, 1], [2, 3]]
    assert len(driver.of(act.Sample)) == 8
    assert driver.schedule.end == act.Finish(2, "max_num_steps (2) reached")


def test_overdue_work_is_done_elsewhere_and_a_silent_worker_ended():
    driver = ready(num_generations_per_prompt=1, num_prompts_per_step=1)
    silent, *_ = driver.of(act.Sample)
    deadline_s = driver.schedule.next_deadline_s()
    assert deadline_s is not None
    # The other generator says something in time.
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
        "no new step for 60 s: the trainer works on step 1"
    )


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


def test_waits_are_told_in_words():
    driver = one_worker(max_staleness=0)
    told = driver.schedule.waits()
    assert told == "step 0 has 0 of 1 finished groups; prompt 0 has 1 sampling"
    driver.tell(ev.WorkerFailed(9.0, GENERATOR, 0, "gone"))
    assert driver.schedule.waits().endswith("generator 0 is starting")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ev.Begin(9.0), "only that, must be Begin"),
        (ev.Tick(0.5), r"order of time: got 0\.5 s after"),
        (ev.WorkerReady(9.0, Worker("generator", 7), 0), "no such worker: got gen"),
    ],
)
def test_events_that_cannot_be_are_refused(event, message):
    driver = one_worker()
    with pytest.raises(ScheduleError, match=message):
        driver.schedule.on(event)


def test_the_first_event_must_be_begin():
    with pytest.raises(ScheduleError, match="must be Begin: got Tick"):
        Driver(settings()).schedule.on(ev.Tick(0.0))
