"""How long groups can wait, and how many."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from rl_algorithms.asynchronous.staleness import StalenessRule


def can_be_ordered(versions, next_step, rule):
    """Try every order of the groups, filling steps one after the other."""
    return any(
        all(
            next_step + place // rule.num_prompts_per_step
            <= version + rule.max_staleness
            for place, version in enumerate(order)
        )
        for order in itertools.permutations(versions)
    )


@given(
    st.lists(st.integers(0, 4), max_size=5),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_groups_fit_where_some_order_is_in_time(versions, step, staleness, per_step):
    rule = StalenessRule(staleness, per_step)
    assert rule.fits(versions, step) == can_be_ordered(versions, step, rule)


def test_the_last_step_is_the_version_plus_the_staleness():
    rule = StalenessRule(2, 4)
    assert rule.last_step(5) == 7
    assert not rule.is_too_old(5, 7)
    assert rule.is_too_old(5, 8)


@pytest.mark.parametrize(("num_groups", "fits"), [(4, True), (5, False)])
def test_no_more_groups_than_the_run_has_steps_for(num_groups, fits):
    assert StalenessRule(9, 2, 5).has_steps_for(num_groups, 3) is fits
    assert StalenessRule(9, 2).has_steps_for(num_groups, 3)
