"""The schedule's overall decisions, and the events that it rejects."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.workers import Worker
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
Driver = _module.Driver
settings = _module.settings
one_worker = _module.one_worker


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
