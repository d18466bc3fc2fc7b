from __future__ import annotations

import math
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rl_distributed.metrics import (
    Distribution,
    Histogram,
    MetricError,
    reduce_metrics,
    to_floats,
)

LARGEST = sys.float_info.max
floats = st.floats(-1e9, 1e9).map(lambda x: 0.0 if abs(x) < 1e-9 else x)
lists = st.lists(floats, min_size=1, max_size=60)


@given(lists, st.sampled_from([0, 1, 25, 50, 90, 99, 100]))
def test_percentiles_are_within_one_percent(values: list[float], percent: int) -> None:
    wanted = sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]
    found = Distribution.of(values).percentile(percent)
    assert math.isclose(found, wanted, rel_tol=0.0101, abs_tol=1e-12)


@given(lists, lists)
def test_adding_up_equals_observing_at_once(a: list[float], b: list[float]) -> None:
    parts = [{"x": Distribution.of(a)}, {"x": Distribution.of(b)}]
    merged = reduce_metrics(parts)["x"]
    at_once = Distribution.of(a + b)
    assert isinstance(merged, Distribution)
    assert merged.buckets == at_once.buckets
    assert merged.negative_buckets == at_once.negative_buckets
    assert merged.to_numbers("x") == pytest.approx(at_once.to_numbers("x"))
    assert pickle.loads(pickle.dumps(merged)) == merged


@given(lists)
def test_histograms_count_everything(values: list[float]) -> None:
    exact = Histogram.of(values, num_bins=8)
    rough = Distribution.of(values).histogram(num_bins=8)
    for found in (exact, rough):
        assert sum(found.counts) == len(values)
        assert found.total == pytest.approx(sum(values), abs=1e-3)
        assert len(found.edges) == 9


def test_one_metric_becomes_several_numbers() -> None:
    numbers = to_floats(
        {"len": Distribution.of(range(1, 101)), "empty": Distribution()}
    )
    assert set(numbers) == {
        f"len/{n}" for n in ("mean", "min", "p50", "p90", "p99", "max")
    }
    assert numbers["len/mean"] == 50.5
    assert (numbers["len/min"], numbers["len/max"]) == (1, 100)
    assert numbers["len/p90"] == pytest.approx(90, rel=0.01)


def test_what_is_not_finite_is_counted_not_hidden() -> None:
    numbers = to_floats({"x": Distribution.of([1.0, math.nan, math.inf])})
    assert numbers["x/num_nonfinite"] == 2
    assert numbers["x/mean"] == 1
    only = to_floats({"x": Distribution.of([math.nan])})
    assert only["x/num_nonfinite"] == 1
    assert math.isnan(only["x/mean"])
    with pytest.raises(MetricError, match="none among 1"):
        Histogram.of([math.nan])


def test_arrays_and_tensors_of_any_shape_are_taken() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    assert Distribution.of(tensor).count == 6
    assert Distribution.of(tensor.bfloat16()).count == 6
    assert Distribution.of(np.zeros((2, 2), np.int32)).num_zeros == 4
    assert Distribution.of([5e-324, 1.7e308, -1.7e308]).percentile(100) == 1.7e308
    assert Histogram.of(tensor, num_bins=2).counts == (0.0, 6.0)


@pytest.mark.parametrize(
    "values",
    [
        [0.3, 0.1 + 0.2],
        [-0.3, -(0.1 + 0.2)],
        [1.0, 1.0 + 2e-14],
        [1e20, 1e20],
        [0.0, 5e-324],
        [-LARGEST, LARGEST],
        [LARGEST, LARGEST],
        [-LARGEST],
    ],
)
def test_values_that_bins_can_hardly_tell_apart_are_counted(
    values: list[float],
) -> None:
    for found in (Histogram.of(values), Distribution.of(values).histogram()):
        assert sum(found.counts) == len(values)
        assert len(found.edges) == 65
        assert found.edges[0] <= min(values) <= max(values) <= found.edges[-1]
        assert all(map(math.isfinite, found.edges))


def test_sums_beyond_the_largest_float_are_infinite() -> None:
    distribution = Distribution.of([LARGEST, LARGEST])
    assert distribution.total == Histogram.of([LARGEST, LARGEST]).total == math.inf


def test_misuse_is_named() -> None:
    with pytest.raises(MetricError, match="numbers only"):
        Distribution.of(["a"])
    with pytest.raises(MetricError, match="from 0 to 100: got 101"):
        Distribution().percentile(101)
    with pytest.raises(MetricError, match="one more than its counts"):
        Histogram((0.0,), (1.0,))
    with pytest.raises(MetricError, match="must rise"):
        Histogram((1.0, 1.0), (1.0,))
    with pytest.raises(MetricError, match="needs a finite number"):
        Distribution().histogram()
