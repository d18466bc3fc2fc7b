"""Which answers are requested, and what happens to the ones that return."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.workers import Worker

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
ready = _module.ready
one_worker = _module.one_worker
finish = _module.finish

GENERATOR = Worker("generator", 0)


def test_sampling_goes_on_while_the_trainer_works():
    driver = ready(max_staleness=1, answers_per_generator=8)
    assert [s.prompt.number for s in driver.of(act.Sample)][::2] == [0, 1, 2, 3]
    while not driver.of(act.Train):
        driver.answer(next(a for a in driver.asked if isinstance(a, act.Sample)))
        driver.answer_all(act.Score)
    driver.answer_all(act.Sample)
    # Step 1 can use two more groups of version 0, and no more.
    assert {s.prompt.number for s in driver.of(act.Sample)} == {0, 1, 2, 3}
    assert {s.version for s in driver.of(act.Sample)} == {0}


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
    # Its age is that of its oldest token: version 0 is one step old in step 1.
    assert driver.trained == [[0], [1]]


def test_an_answer_with_other_weights_is_refused_and_its_generator_ended():
    driver = one_worker()
    driver.answer(driver.of(act.Sample)[0], oldest_version=5, newest_version=5)
    (stop,) = driver.of(act.StopWorker)
    assert "versions 5 to 5, and had confirmed 0" in stop.reason
    assert act.Discard(0) in driver.done


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


def test_a_failed_answer_is_sampled_elsewhere_with_the_same_seeds():
    driver = ready(num_generations_per_prompt=1, num_prompts_per_step=1)
    failed = driver.of(act.Sample)[0]
    driver.asked.remove(failed)
    event = ev.AnswerFailed(driver.now_s, failed.worker, 0, failed.task, "odd")
    (again,) = driver.tell(event)
    assert again.worker != failed.worker
    assert again.name == failed.name


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
