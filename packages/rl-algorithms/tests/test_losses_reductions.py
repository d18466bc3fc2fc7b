from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_algorithms.losses.reductions import masked_mean, masked_sum

rows = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-1e3, 1e3), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_masked_mean_is_the_mean_of_the_kept(row: tuple[list[float], list[bool]]):
    values, kept = row
    got = masked_mean(
        torch.tensor(values, dtype=torch.float64), torch.tensor(kept).double()
    )
    chosen = [v for v, keep in zip(values, kept, strict=True) if keep]
    want = math.fsum(chosen) / len(chosen) if chosen else 0.0
    assert float(got) == pytest.approx(want, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 5))
def test_parts_add_up_with_a_global_factor(
    row: tuple[list[float], list[bool]], cut: int
):
    values = torch.tensor(row[0], dtype=torch.float64)
    mask = torch.tensor(row[1]).double()
    count = mask.sum()
    whole = masked_mean(values, mask, global_normalization_factor=count)
    parts = [
        masked_mean(v, m, global_normalization_factor=count)
        for v, m in zip(values.split(cut), mask.split(cut), strict=True)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-9)


def test_dimensions_and_empty_rows():
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert masked_mean(values, mask, dim=-1).tolist() == [2.0, 0.0]
    assert masked_mean(values, mask, dim=0).tolist() == [1.0, 3.0]
    assert float(masked_mean(values, torch.zeros(2, 2))) == 0.0
    none = torch.zeros(2, 2)
    assert float(masked_mean(values, none, global_normalization_factor=0)) == 0.0
    assert float(masked_sum(values, mask)) == 4.0


def test_a_broadcast_mask_counts_what_it_covers():
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert float(masked_mean(values, torch.tensor([[1.0], [0.0]]))) == 2.0


def test_nan_under_the_mask_reaches_neither_value_nor_gradient():
    values = torch.tensor([1.0, math.nan, math.inf], requires_grad=True)
    mean = masked_mean(values, torch.tensor([1.0, 0.0, 0.0]))
    mean.backward()
    assert mean.item() == 1.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]
