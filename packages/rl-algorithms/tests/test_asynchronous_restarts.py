"""How often, and after which delay, a worker is restarted."""

from __future__ import annotations

import pytest

from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_distributed.errors import ConfigError


def test_pauses_double_up_to_the_longest_and_end():
    policy = RestartPolicy(max_restarts=5, backoff_s=2.0, max_backoff_s=7.0)
    pauses = [policy.pause_before(failures) for failures in range(1, 7)]
    assert pauses == [0.0, 2.0, 4.0, 7.0, 7.0, None]


def test_no_restart_is_a_policy_too():
    assert RestartPolicy(max_restarts=0).pause_before(1) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_restarts": -1}, "max_restarts must not be negative: got -1"),
        ({"backoff_s": -0.5}, r"backoff_s must not be negative: got -0\.5"),
        ({"max_backoff_s": float("nan")}, "max_backoff_s must not be negative"),
    ],
)
def test_impossible_numbers_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RestartPolicy(**values)
