"""Looks for a scenario in which something does not hold."""

from __future__ import annotations

from collections.abc import Iterable

from tools.simulate.scenario import draw_scenario
from tools.simulate.world import Outcome, simulate

__all__ = ["first_failure"]


def first_failure(seeds: Iterable[int]) -> Outcome | None:
    """Return the run of the first seed in which something does not hold, if any."""
    for seed in seeds:
        outcome = simulate(draw_scenario(seed))
        if outcome.violation is not None:
            return outcome
    return None
