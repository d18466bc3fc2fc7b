from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_algorithms.advantages.whitening import whiten

VALUES = st.lists(
    st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(VALUES)
def test_each_value_counts_as_often_as_its_weight_says(drawn):
    values = torch.tensor([value for value, _ in drawn], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in drawn])
    taken = [value for value, weight in drawn for _ in range(weight)]
    found = whiten(values, weights)
    assert not found[weights == 0].any()
    if len(taken) < 2:
        assert not found.any()
        return
    mean, std = statistics.fmean(taken), statistics.stdev(taken)
    if std <= 1e-5 * max(map(abs, taken)):
        return
    wanted = [(value - mean) / std if weight else 0.0 for value, weight in drawn]
    assert found.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_offset_scale_and_what_does_not_count_change_nothing():
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, 7.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    found = whiten(values, mask)
    torch.testing.assert_close(whiten(3 * values + 5e6, mask), found)
    assert found[:, 2].tolist() == [0.0, 0.0]
    assert whiten(values.float(), mask).dtype == torch.float32


def test_without_spread_everything_is_0():
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    assert not whiten(torch.full((1, 3), 0.1), mask).any()
    assert not whiten(torch.tensor([[9.0, 0.1, 0.1 + 1e-9]]).double(), mask).any()
    assert not whiten(torch.ones(1, 3), torch.zeros(1, 3)).any()
    assert whiten(torch.ones(0), torch.ones(0)).shape == (0,)
