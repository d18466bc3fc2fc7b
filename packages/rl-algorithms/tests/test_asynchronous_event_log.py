"""A schedule is deterministic: the same events yield the same actions, bit by bit."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.event_log import EventLog, first_change, replay
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.workers import TRAINER, Worker
from rl_algorithms.errors import ScheduleError
from rl_algorithms.replay.decisions import changed_decision

_spec = importlib.util.spec_from_file_location(
    "asynchronous_driver", Path(__file__).with_name("asynchronous_driver.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
Driver, settings = _module.Driver, _module.settings


def eventful_run(state=None):
    """Run with failures of all kinds of workers, in a random order."""
    rng = random.Random(3)
    driver = Driver(settings(checkpoint_period=1, max_staleness=2), state=state)
    driver.begin()
    for _ in range(30):
        driver.answer(rng.choice(driver.asked))
    for worker in (Worker("generator", 1), Worker("environment", 0), TRAINER):
        driver.now_s += 0.1
        driver.tell(ev.WorkerFailed(driver.now_s, worker, 0, "gone"))
    return driver.run(lambda asked: rng.randrange(len(asked)))


@pytest.fixture(scope="module")
def driver():
    return eventful_run()


@pytest.mark.parametrize("period", [None, 2], ids=["the start", "a checkpoint"])
def test_the_step_of_another_decision_counts_steps_taken_again_once(tmp_path, period):
    driver = Driver(settings(checkpoint_period=period))
    driver.begin()
    while len(driver.trained) < 4:
        driver.answer(driver.asked[0])
    driver.tell(ev.WorkerFailed(driver.now_s, TRAINER, 0, "gone"))
    log = driver.run().log
    lines = list(log.to_lines())
    schedule = Schedule(log.settings)
    steps = []
    for entry in log.entries:
        steps.append(schedule.state_dict()["step"] + 1)
        schedule.on(entry.event)
    # The trainer goes back on the way.
    trained = sum(isinstance(entry.event, ev.StepTrained) for entry in log.entries)
    assert trained > max(steps) - 1
    place = len(log.entries) - 1
    other = {**json.loads(lines[place + 1]), "actions": []}
    assert other != json.loads(lines[place + 1])
    lines[place + 1] = json.dumps(other)
    (tmp_path / "events_000000.jsonl").write_text("\n".join(lines))
    assert changed_decision(tmp_path).step == steps[place]


def test_a_log_is_replayed_to_the_same_actions(driver):
    log = driver.log
    assert len(log.entries) > 50
    assert replay(log) == [entry.actions for entry in log.entries]
    lines = list(log.to_lines())
    read = EventLog.from_lines(lines)
    again = [json.dumps(json.loads(line)["actions"]) for line in _with_actions(read)]
    assert again == [json.dumps(json.loads(line)["actions"]) for line in lines[1:]]


def _with_actions(log):
    actions = replay(log)
    for entry, found in zip(log.entries, actions, strict=True):
        entry.actions.extend(found)
    return list(log.to_lines())[1:]


def test_lines_are_taken_once_and_are_the_whole_log(driver):
    log = EventLog(driver.log.settings)
    taken = []
    for number, entry in enumerate(driver.log.entries):
        log.entries.append(entry)
        if number % 7 == 0:
            taken += log.take_lines()
            assert log.entries == []
    taken += log.take_lines()
    assert taken == list(driver.log.to_lines())
    assert log.take_lines() == []


def test_a_log_of_a_resumed_run_begins_with_its_state(driver):
    state = driver.of(act.SaveCheckpoint)[0].state
    resumed = eventful_run(json.loads(json.dumps(state)))
    read = EventLog.from_lines(resumed.log.to_lines())
    assert read.state == state
    assert replay(read) == [entry.actions for entry in resumed.log.entries]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "must begin with its settings"),
        (['{"event": 1}'], "must begin with its settings"),
    ],
)
def test_other_lines_are_no_log(lines, message):
    with pytest.raises(ScheduleError, match=message):
        EventLog.from_lines(lines)


def test_an_unknown_event_is_named(driver):
    first = next(iter(driver.log.to_lines()))
    with pytest.raises(ScheduleError, match="must be an event: got type 'Guess'"):
        EventLog.from_lines([first, '{"event": {"type": "Guess"}, "actions": []}'])


def test_the_first_other_decision_is_found(driver):
    lines = list(driver.log.to_lines())
    assert first_change(lines) is None
    place = [i for i, line in enumerate(lines) if '"type": "Sample"' in line][3]
    entry = json.loads(lines[place])
    logged = entry["actions"]
    entry["actions"] = logged[:-1]
    lines[place] = json.dumps(entry)
    assert first_change(lines) == (place, logged[:-1], logged)
