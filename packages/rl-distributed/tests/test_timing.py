from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings, strategies as st

from rl_distributed.errors import ConfigError
from rl_distributed.timing.timer import TimeoutChecker, Timer, convert_to_seconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_are_measured_and_reduced() -> None:
    clock = Clock()
    timer = Timer(clock=clock)
    for seconds in (1.0, 3.0):
        with timer.time("step"):
            clock.now += seconds
    timer.start("other")
    clock.now += 5
    assert timer.stop("other") == 5
    assert timer.get_elapsed("step") == [1, 3]
    assert timer.get_latest_elapsed("step") == 3
    assert timer.get_timing_metrics() == {"step": 2, "other": 5}
    assert timer.get_timing_metrics({"step": "sum"}) == {"step": 4, "other": 5}
    assert timer.get_timing_metrics("count") == {"step": 2, "other": 1}


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_reductions_agree_with_their_definitions(values: list[float]) -> None:
    timer = Timer()
    for value in values:
        timer.record("x", value)
    assert timer.reduce("x") == pytest.approx(sum(values) / len(values))
    assert timer.reduce("x", "median") == statistics.median(values)
    assert timer.reduce("x", "min") == min(values)
    assert timer.reduce("x", "max") == max(values)
    assert timer.reduce("x", "count") == len(values)
    assert timer.reduce("x", "std") == pytest.approx(statistics.pstdev(values))


def test_a_span_that_raises_is_closed() -> None:
    timer = Timer()
    with pytest.raises(RuntimeError), timer.time("x"):
        raise RuntimeError
    assert timer.reduce("x", "count") == 1


def test_misuse_is_named() -> None:
    timer = Timer()
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is running already"):
        timer.start("a")
    with pytest.raises(ValueError, match=r"'b' is not running \(running: a\)"):
        timer.stop("b")
    with pytest.raises(KeyError, match="never measured"):
        timer.get_latest_elapsed("a")
    with pytest.raises(ValueError, match="cannot have taken"):
        timer.record("a", math.nan)
    timer.record("a", 1.0)
    with pytest.raises(ValueError, match="unknown reduction 'avg'"):
        timer.reduce("a", "avg")
    with pytest.raises(ValueError, match="unknown reduction 'avg'"):
        timer.get_timing_metrics({"a": "avg"})


def test_reset_forgets_one_label_or_all() -> None:
    timer = Timer({"worker": 1})
    timer.record("a", 1)
    timer.record("b", 1)
    timer.mark("sync", {"step": 3})
    [marker] = timer.get_markers()
    assert marker.metadata == {"worker": 1, "step": 3}
    timer.reset("a")
    assert set(timer.get_timing_metrics()) == {"b"}
    timer.reset()
    assert timer.get_timing_metrics() == {}
    assert timer.get_markers() == []


def test_durations() -> None:
    assert convert_to_seconds("01:02:03:04") == 93784
    for wrong in (
        "",
        "03:45:00",
        "aa:00:00:00",
        "00:24:00:00",
        "00:00:61:00",
        "-1:0:0:0",
    ):
        with pytest.raises(ConfigError, match="my_field"):
            convert_to_seconds(wrong, name="my_field")


def test_a_save_is_asked_for_once_when_time_is_up() -> None:
    clock = Clock()
    checker = TimeoutChecker("00:00:01:00", clock=clock)
    clock.now += 59
    assert not checker.check_save()
    clock.now += 1
    assert checker.check_save()
    assert not checker.check_save()


def test_the_reserve_is_one_mean_iteration() -> None:
    clock = Clock()
    checker = TimeoutChecker("00:00:01:00", fit_last_save_time=True, clock=clock)
    checker.mark_iteration()  # without start_iterations: only starts one
    for _ in range(2):
        clock.now += 20
        checker.mark_iteration()
    assert checker.check_save()


def test_no_limit_never_asks() -> None:
    clock = Clock()
    checker = TimeoutChecker(None, clock=clock)
    checker.start_iterations()
    clock.now += 1e9
    assert not checker.check_save()
