"""The watch over the steps of an engine, with a fake clock."""

from __future__ import annotations

import queue

import pytest

from rl_models.generation.vllm import stall_watch
from rl_models.generation.vllm.stall_watch import EngineProgress, StallWatch
from rl_models.generation.vllm_config import VllmConfig


class Clock:
    """Stands still unless advanced."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return EngineProgress(clock)


def steps(progress, clock, count, seconds):
    for _ in range(count):
        clock.now += seconds
        progress.step()


def make_watch(progress, *, limit_s=None, is_busy=lambda: False):
    told = []
    watch = StallWatch(
        progress,
        told.append,
        limit_s=limit_s,
        warm_up_s=60.0,
        least_s=6.0,
        is_busy=is_busy,
    )
    return watch, told


def test_the_limit_follows_the_slowest_step(progress, clock):
    with progress.sampling(10):
        assert progress.limit_s(None, 60.0, 6.0) == 60.0
        steps(progress, clock, 7, 0.1)
        assert progress.limit_s(None, 60.0, 6.0) == 60.0
        assert progress.limit_s(2.0, 60.0, 6.0) == 60.0
        steps(progress, clock, 1, 0.1)
        assert progress.limit_s(None, 60.0, 6.0) == 6.0
        assert progress.limit_s(None, 60.0, 30.0) == 30.0
        assert progress.limit_s(2.0, 60.0, 6.0) == 2.0
        steps(progress, clock, 1, 4.0)
        assert progress.limit_s(None, 60.0, 6.0) == 20.0
    # Three times as many tokens as ever before: only once a step has ended with them.
    with progress.sampling(10), progress.sampling(20):
        assert progress.limit_s(None, 60.0, 6.0) == 60.0
        assert progress.limit_s(2.0, 60.0, 6.0) == 2.0
        steps(progress, clock, 1, 0.1)
        assert progress.limit_s(None, 60.0, 6.0) == 20.0


def test_the_first_steps_raise_it_by_less(progress, clock):
    with progress.sampling(10):
        steps(progress, clock, 1, 10.0)
        steps(progress, clock, 8, 0.1)
        assert progress.limit_s(None, 60.0, 6.0) == 20.0


def test_neither_rest_nor_a_pause_makes_a_step_slow(progress, clock):
    with progress.sampling(10):
        steps(progress, clock, 8, 0.1)
    clock.now += 500.0
    with progress.sampling(10):
        steps(progress, clock, 1, 0.1)
        with progress.paused():
            clock.now += 500.0
            progress.step()
        steps(progress, clock, 1, 0.1)
    assert progress.limit_s(None, 60.0, 6.0) == 6.0


def test_an_engine_that_makes_no_step_is_told_of_once_its_limit_is_over(
    progress, clock
):
    watch, told = make_watch(progress)
    with progress.sampling(10):
        steps(progress, clock, 8, 0.1)
        # The first look detects progress.
        assert [watch.look(1.0) for _ in range(7)] == [False] * 6 + [True]
    assert told == ["vLLM's engine has rows to sample and made no step for 6 s"]


def test_steps_pauses_and_rest_are_no_stall(progress, clock):
    watch, told = make_watch(progress, limit_s=2.0)
    assert not any(watch.look(1.0) for _ in range(10))
    with progress.sampling(10):
        steps(progress, clock, 8, 0.1)
        for _ in range(10):
            steps(progress, clock, 1, 1.0)
            assert not watch.look(1.0)
            assert not watch.look(1.0)
        with progress.paused():
            assert not any(watch.look(1.0) for _ in range(10))
        # After a pause the count starts over.
        assert not watch.look(1.0)
        assert not watch.look(1.0)
    assert not any(watch.look(1.0) for _ in range(10))
    assert told == []


def test_the_first_steps_have_the_time_that_a_start_has(progress, clock):
    watch, told = make_watch(progress, limit_s=2.0)
    with progress.sampling(10):
        steps(progress, clock, 7, 0.1)
        assert [watch.look(10.0) for _ in range(7)] == [False] * 6 + [True]
    assert len(told) == 1


def test_time_at_work_counts_for_a_tenth(progress, clock):
    watch, _ = make_watch(progress, is_busy=lambda: True)
    with progress.sampling(10):
        steps(progress, clock, 8, 0.1)
        assert not any(watch.look(1.0) for _ in range(60))
        assert any(watch.look(1.0) for _ in range(3))


def test_the_watch_looks_from_a_thread_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(stall_watch, "_LOOK_S", 0.01)
    progress = EngineProgress()
    told = queue.Queue()
    watch = StallWatch(
        progress,
        told.put,
        limit_s=0.05,
        warm_up_s=60.0,
        least_s=6.0,
        is_busy=lambda: False,
    )
    watch.start()
    with progress.sampling(1):
        for _ in range(8):
            progress.step()
        assert "made no step for 0.05 s" in told.get(timeout=60)
    watch.close()
    other, told = make_watch(progress)
    other.start()
    other.close()
    assert told == []


def test_a_limit_must_be_positive():
    assert VllmConfig(stall_limit_s=2).stall_limit_s == 2.0
    with pytest.raises(ValueError, match="stall_limit_s"):
        VllmConfig(stall_limit_s=0)
