"""A subset of simulated worlds and defects; `nox -s simulate` runs all of them."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from tools.simulate.defects import DEFECTS, Defect
from tools.simulate.scenario import draw_scenario
from tools.simulate.search import first_failure
from tools.simulate.shrink import shrink
from tools.simulate.world import simulate

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.event_log import EventLog, replay

NUM_WORLDS = 600
COVERING = [defect for defect in DEFECTS if defect.is_covering]


def named(name: str) -> Defect:
    (defect,) = [defect for defect in DEFECTS if defect.name == name]
    return defect


def test_every_invariant_holds_in_every_world_and_quickly() -> None:
    begin_s = time.process_time()
    found = first_failure(range(NUM_WORLDS))
    cpu_s = time.process_time() - begin_s
    assert found is None, found and found.violation
    assert NUM_WORLDS / cpu_s * 60 >= 2_000


def test_the_worlds_have_all_that_can_happen() -> None:
    faults: Counter[str] = Counter()
    actions: Counter[str] = Counter()
    for seed in range(150):
        scenario = draw_scenario(seed)
        faults.update(fault.kind for fault in scenario.faults)
        outcome = simulate(scenario, tells=True)
        for log in outcome.logs:
            for entry in log.entries:
                actions.update(type(action).__name__ for action in entry.actions)
                actions[type(entry.event).__name__] += 1
    assert len(faults) == 16
    # Worlds do not pause their trainer: test_asynchronous_training.py and
    # test_ahead_end_to_end.py pause runs.
    assert set(actions) == {*ev.__all__, *act.__all__} - {
        "Action", "Event", "TrainedGroup", "RunPaused", "RunResumed"}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 17, 200])
def test_a_world_is_the_same_each_time_and_its_logs_are_replayed(seed: int) -> None:
    first, second = (simulate(draw_scenario(seed), tells=True) for _ in range(2))
    assert first.story == second.story
    for log in first.logs:
        expected = [entry.actions for entry in log.entries]
        assert replay(EventLog.from_lines(log.to_lines())) == expected


@pytest.mark.parametrize("defect", COVERING, ids=lambda defect: defect.name)
def test_known_defects_are_found(defect: Defect) -> None:
    with defect.planted():
        found = first_failure(range(NUM_WORLDS))
    assert found is not None, defect.story
    assert simulate(found.scenario).violation is None, "it is the defect that fails"


def test_there_are_defects_of_all_parts() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(set(names)) == len(names) >= 25
    assert len(COVERING) >= 12
    changed = {patch[0] for defect in DEFECTS for patch in defect.patches()}
    parts = {getattr(one, "__name__", "").rpartition(".")[2] for one in changed}
    assert parts >= {
        "PromptOrder", "StalenessRule", "GroupBuffer", "Group", "WeightVersions",
        "Deadlines", "RestartPolicy", "Sampling", "Training", "Failures", "Workforce",
        "RunState", "drops", "training"}  # fmt: skip


def test_a_failure_is_made_smaller_and_told() -> None:
    with named("waiter-left-behind").planted():
        found = first_failure(range(NUM_WORLDS))
        assert found is not None
        assert found.violation is not None
        least = shrink(found)
        told = simulate(least.scenario, tells=True)
    assert least.violation is not None
    assert least.violation.rule == found.violation.rule
    assert len(least.scenario.faults) <= len(found.scenario.faults)
    assert least.scenario.num_prompts < found.scenario.num_prompts
    assert len(least.scenario.faults) == 1
    assert sum("FAULT" in line for line in told.story) == 1
    assert len(told.story) < 60
    assert told.story[-1].partition("BROKEN ")[2] == str(told.violation)
