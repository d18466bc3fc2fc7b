from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_distributed.metrics import (
    Last,
    Max,
    Mean,
    MetricError,
    MetricValue,
    Min,
    Sum,
    as_metric,
    reduce_metrics,
    to_floats,
)

floats = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(st.lists(st.lists(floats, min_size=1), min_size=1))
def test_means_of_unequal_groups_are_exact(groups: list[list[float]]) -> None:
    reduced = reduce_metrics([{"x": Mean.of(group)} for group in groups])
    everything = [value for group in groups for value in group]
    expected = np.mean(np.array(everything, dtype=np.float64))
    assert float(reduced["x"]) == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(st.lists(floats, min_size=2), st.data())
@pytest.mark.parametrize("kind", [Sum, Min, Max, Last, Mean])
def test_reducing_in_stages_equals_reducing_at_once(
    kind: type[MetricValue], values: list[float], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(values) - 1))
    parts = [{"x": kind(value)} for value in values]  # type: ignore[call-arg]
    staged = reduce_metrics([reduce_metrics(parts[:cut]), reduce_metrics(parts[cut:])])
    at_once = reduce_metrics(parts)
    assert float(staged["x"]) == pytest.approx(float(at_once["x"]), abs=1e-6)
    assert type(staged["x"]) is kind


def test_each_type_reduces_in_its_way() -> None:
    reduced = reduce_metrics(
        [
            {"a": Sum(1), "b": Min(1), "c": Max(1), "d": Last(1), "e": 1.0},
            {"a": Sum(2), "b": Min(2), "c": Max(2), "d": Last(2), "e": 2.0, "f": 9},
        ]
    )
    assert to_floats(reduced) == {"a": 3, "b": 1, "c": 2, "d": 2, "e": 1.5, "f": 9}


def test_plain_numbers_can_be_summed() -> None:
    reduced = reduce_metrics([{"loss": 0.25}, {"loss": 0.5}], plain=Sum)
    assert float(reduced["loss"]) == 0.75


def test_nan_is_never_hidden() -> None:
    for kind in (Min, Max):
        for pair in ((1.0, math.nan), (math.nan, 1.0)):
            assert math.isnan(float(kind(pair[0]).merge(kind(pair[1]))))


def test_means_of_a_diverged_run_are_shown() -> None:
    assert math.isnan(Mean.of([math.inf, -math.inf]).value)
    assert Mean.of([1.7e308, 1.7e308]).value == math.inf


def test_a_mean_without_observations_is_left_out() -> None:
    assert to_floats({"x": Mean(0.0, 0.0), "y": 1}) == {"y": 1}
    assert math.isnan(float(Mean(0.0, 0.0)))


def test_numbers_of_array_libraries_are_taken() -> None:
    values = {"a": torch.tensor(2.0), "b": np.float32(3), "c": np.array([4]), "d": True}
    assert to_floats(values) == {"a": 2, "b": 3, "c": 4, "d": 1}


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(MetricError, match="'x' must be one number: got an array of 2"):
        as_metric(torch.zeros(2), name="x")
    with pytest.raises(MetricError, match="'x' must be a number or one of"):
        reduce_metrics([{"x": "high"}])
    with pytest.raises(MetricError, match="'x' is a Sum in one observation and a Max"):
        reduce_metrics([{"x": Sum(1)}, {"x": Max(1)}])
    with pytest.raises(MetricError, match="Sum takes a plain number"):
        Sum(torch.tensor(1.0))  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="cannot be negative"):
        Mean(1.0, -1.0)


def test_values_cross_processes() -> None:
    for value in (Mean(1.0, 2.0), Sum(1), Min(1), Max(1), Last(1)):
        assert pickle.loads(pickle.dumps(value)) == value
