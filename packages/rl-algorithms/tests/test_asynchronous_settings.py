"""Invalid settings are rejected with the remedy."""

from __future__ import annotations

import pytest

from rl_algorithms.asynchronous.settings import ScheduleSettings, WaitLimits
from rl_distributed.errors import ConfigError

SMALL = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 2,
    "prompts_per_epoch": 8,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": -1}, "max_staleness must be a whole number of at least 0"),
        ({"num_generators": 0}, "num_generators must be .* at least 1: got 0"),
        ({"max_attempts": True}, "max_attempts must be .* got True"),
        ({"max_num_steps": 0}, "max_num_steps must be .* got 0"),
        ({"checkpoint_period": 1.5}, r"checkpoint_period must be .* got 1\.5"),
        ({"max_num_epochs": None}, "the run would never end"),
        ({"max_groups": 3}, "at least num_prompts_per_step, .* got 3 with 4"),
        ({"weight_updates": "now"}, "between_answers or between_tokens: got 'now'"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ScheduleSettings(**{**SMALL, **changes})


def test_limits_are_positive():
    with pytest.raises(ConfigError, match="load_s must be positive: got 0"):
        WaitLimits(load_s=0)


@pytest.mark.parametrize(
    ("changes", "limit"), [({}, 12), ({"max_groups": 5}, 5), ({"max_groups": 99}, 12)]
)
def test_groups_are_bounded_by_staleness_and_by_the_setting(changes, limit):
    settings = ScheduleSettings(**SMALL, max_staleness=2, **changes)
    assert settings.group_limit == limit
