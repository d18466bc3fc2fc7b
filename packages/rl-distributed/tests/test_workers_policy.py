from __future__ import annotations

import time

import pytest

from rl_distributed.errors import ConfigError
from rl_distributed.workers import FailFast, RestartGroup, RestartWorker


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FailFast(heartbeat_limit_s=0), "heartbeat_limit_s must be positive"),
        (lambda: FailFast(release_after_s=-1), "release_after_s must not be negative"),
        (lambda: RestartWorker(max_restarts=0), "at least 1: got 0; use FailFast"),
        (lambda: RestartGroup(backoff_s=-1), "backoff_s must not be negative"),
        (lambda: RestartGroup(retry_calls="add"), r"write \['add'\]"),
    ],
)
def test_wrong_values(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_policies_cannot_be_changed():
    with pytest.raises(AttributeError):
        FailFast().release_after_s = 2


def test_which_calls_are_retried():
    assert not FailFast().retries("add")
    assert not RestartWorker().retries("add")
    assert RestartWorker(retry_calls=True).retries("add")
    assert RestartGroup(retry_calls=["add"]).retries("add")
    assert not RestartGroup(retry_calls=["add"]).retries("sub")


def test_pauses_double_up_to_the_longest_and_end_with_the_tries():
    policy = RestartWorker(max_restarts=5, backoff_s=1, max_backoff_s=3, within_s=60)
    now = time.monotonic()
    pauses = [policy.pause_before([now] * count) for count in range(6)]
    assert pauses == [0.0, 1.0, 2.0, 3.0, 3.0, None]
    patient = RestartWorker(max_restarts=5_000, backoff_s=1, max_backoff_s=3)
    assert patient.pause_before([now] * 4_000) == 3.0


def test_restarts_of_long_ago_do_not_count():
    policy = RestartWorker(max_restarts=1, within_s=60)
    assert policy.pause_before([time.monotonic() - 61]) == 0.0
    assert policy.pause_before([time.monotonic() - 59]) is None
