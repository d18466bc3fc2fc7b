"""Shrink a failing scenario while the same invariant is violated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from tools.simulate.scenario import Fault, Scenario
from tools.simulate.world import Outcome, simulate

__all__ = ["shrink"]

_MAX_RUNS = 600
_EARLY_S = 4.0
# The smallest value of each, and so the easiest to follow.
_LEAST = {
    "num_epochs": 1,
    "prompts_per_epoch": 1,
    "num_generations": 1,
    "num_generators": 1,
    "num_environments": 1,
    "num_prompts_per_step": 1,
    "max_staleness": 0,
    "places": 1,
}


def shrink(outcome: Outcome) -> Outcome:
    """Return the smallest failing run found by shrinking one.

    Args:
        outcome: A run that violated an invariant.
    """
    assert outcome.violation is not None
    rule, best = outcome.violation.rule, outcome
    runs = 0
    going = True
    while going and runs < _MAX_RUNS:
        going = False
        for smaller in _smaller(best.scenario):
            runs += 1
            found = simulate(smaller)
            if found.violation is not None and found.violation.rule == rule:
                best, going = found, True
                break
            if runs >= _MAX_RUNS:
                break
    return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller scenarios, the much smaller ones first."""
    yield from _with_fewer_faults(scenario)
    yield from _with_smaller_numbers(scenario)
    yield from _with_earlier_faults(scenario)
    for field in fields(scenario):
        is_limit = field.name in ("max_num_steps", "max_groups", "checkpoint_period")
        if is_limit and getattr(scenario, field.name) is not None:
            yield replace(scenario, **{field.name: None})


def _with_fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    for size in dict.fromkeys((len(faults), len(faults) // 2, 1)):
        for begin in range(0, len(faults), max(size, 1)):
            kept = faults[:begin] + faults[begin + size :]
            if len(kept) < len(faults):
                yield replace(scenario, faults=kept)


def _with_smaller_numbers(scenario: Scenario) -> Iterator[Scenario]:
    for name, least in _LEAST.items():
        value = getattr(scenario, name)
        for lower in dict.fromkeys((least, (value + least) // 2, value - 1)):
            if least <= lower < value:
                smaller = _with(scenario, name, lower)
                # A shorter run may end before its faults strike.
                for part in (lower / value, 1.0):
                    yield replace(smaller, faults=_earlier(smaller.faults, part))


def _with_earlier_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    for place, fault in enumerate(faults):
        if fault.at_s > _EARLY_S:
            sooner = _earlier((fault,), 0.5)
            kept = (*faults[:place], *sooner, *faults[place + 1 :])
            yield replace(scenario, faults=kept)


def _earlier(faults: tuple[Fault, ...], part: float) -> tuple[Fault, ...]:
    return tuple(replace(f, at_s=round(f.at_s * part, 2)) for f in faults)


def _with(scenario: Scenario, name: str, value: int) -> Scenario:
    """Return a scenario with another number, without faults of removed parts."""
    changed = replace(scenario, **{name: value})
    if changed.max_groups is not None:
        limit = max(changed.max_groups, changed.num_prompts_per_step)
        changed = replace(changed, max_groups=limit)
    return replace(changed, faults=tuple(_remaining(changed)))


def _remaining(scenario: Scenario) -> Iterator[Fault]:
    known = {None, *scenario.workers}
    for fault in scenario.faults:
        others = tuple(worker for worker in fault.others if worker in known)
        is_trainer = fault.worker is not None and fault.worker.kind == "trainer"
        if fault.worker in known or is_trainer:
            yield replace(fault, others=others)
