"""Search for a scenario that violates an invariant."""

from __future__ import annotations

from collections.abc import Iterable

from tools.simulate.scenario import draw_scenario
from tools.simulate.world import Outcome, simulate

__all__ = ["first_failure"]


def first_failure(seeds: Iterable[int]) -> Outcome | None:
    """Return the run of the first seed that violates an invariant, if any."""
    for seed in seeds:
        outcome = simulate(draw_scenario(seed))
        if outcome.violation is not None:
            return outcome
    return None
