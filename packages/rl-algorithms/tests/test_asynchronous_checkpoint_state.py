"""A run killed at any event loses no prompt and trains on none twice."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rl_algorithms.asynchronous import actions as act
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.errors import ScheduleError

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
Driver, settings = _module.Driver, _module.settings


def trained_before(driver, state):
    """Return the prompts of the steps that a checkpoint's weights include."""
    steps = driver.trained[: state["step"]] if state else []
    return [number for step in steps for number in step]


@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data(), kill_at=st.integers(1, 90))
def test_a_killed_driver_goes_on_where_its_checkpoint_is(data, kill_at):
    shape = settings(max_staleness=2, checkpoint_period=2, max_num_epochs=2)
    driver = Driver(shape)
    driver.begin()
    for _ in range(kill_at):
        if driver.schedule.end is not None:
            break
        index = data.draw(st.integers(0, len(driver.asked) - 1))
        driver.answer(driver.asked[index])
    before = trained_before(driver, driver.durable)
    resumed = Driver(shape, state=driver.durable).run()
    after = [number for step in resumed.trained for number in step]
    assert sorted(before + after) == list(range(16))


def resumed_state(max_staleness=2):
    """Return a state with finished and unfinished groups."""
    driver = Driver(settings(max_staleness=max_staleness, checkpoint_period=2))
    driver.begin()
    # The trainer is slow: everything else runs ahead of it.
    while not driver.of(act.SaveCheckpoint):
        others = [a for a in driver.asked if not isinstance(a, act.Train)]
        driver.answer((others or driver.asked)[0])
    return driver.of(act.SaveCheckpoint)[0].state


def test_the_state_is_plain_json_with_the_buffer_and_what_is_under_way():
    state = resumed_state()
    assert json.loads(json.dumps(state)) == state
    assert state["step"] == 2
    prompts = [entry["prompt"] for entry in state["groups"]]
    assert prompts == list(range(4, state["position"]))
    finished = [entry for entry in state["groups"] if "answers" in entry]
    assert len(finished) > 0
    again = Schedule(settings(max_staleness=2))
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_the_state_in_the_middle_of_a_step_has_its_groups():
    driver = Driver(settings(max_staleness=0))
    driver.begin()
    while not driver.of(act.Train):
        driver.answer(driver.asked[0])
    state = driver.schedule.state_dict()
    assert state["step"] == 0
    assert [entry["prompt"] for entry in state["groups"]] == [0, 1]
    resumed = Driver(settings(max_staleness=0), state=state).run()
    assert resumed.trained == driver.run().trained


def test_groups_that_a_lower_staleness_makes_too_old_are_dropped_and_reported():
    state = resumed_state()
    versions = {
        entry["prompt"]: min(answer["oldest_version"] for answer in entry["answers"])
        for entry in state["groups"]
        if "answers" in entry
    }
    assert all(None not in entry.get("answers", ()) for entry in state["groups"])
    too_old = sorted(n for n, version in versions.items() if version < 2)
    assert too_old
    driver = Driver(settings(max_staleness=0), state=state).run()
    drops = driver.of(act.DropGroup)
    assert sorted(drop.prompt.number for drop in drops) == too_old
    assert all("max_staleness=0" in drop.reason for drop in drops)
    assert {drop.num_tokens for drop in drops} == {14}
    assert {drop.mean_reward for drop in drops} == {1.0}
    trained = sorted(number for step in driver.trained for number in step)
    assert trained == sorted(set(range(4, 8)) - set(too_old))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "must have format 2 or an older one: got 3"),
        ({"prompts_per_epoch": 9}, "prompts_per_epoch was 9 when .* and is 8 now"),
        ({"num_generations_per_prompt": 4}, "num_generations_per_prompt was 4"),
        ({"step": None}, None),
    ],
)
def test_states_of_other_runs_are_refused(changes, message):
    state = {**Schedule(settings()).state_dict(), **changes}
    if message is None:
        del state["step"]
        message = "lacks step: it was not saved by"
    with pytest.raises(ScheduleError, match=message):
        Schedule(settings()).load_state_dict(state)


def test_a_state_is_loaded_before_the_run_begins():
    driver = Driver(settings())
    driver.begin()
    with pytest.raises(ScheduleError, match="must come before Begin"):
        driver.schedule.load_state_dict(driver.schedule.state_dict())
