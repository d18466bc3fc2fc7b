from __future__ import annotations

import pytest
import torch

from rl_algorithms.advantages.config import RewardScalingConfig, RewardShapingConfig
from rl_algorithms.advantages.overlong import shape_rewards
from rl_algorithms.advantages.rewards import scale_rewards
from rl_distributed.errors import ConfigError


def test_scaling_clamps_and_counts():
    config = RewardScalingConfig(
        source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0
    )
    scaled, outside = scale_rewards(torch.tensor([-5.0, 0.0, 1.0, 2.0]), config)
    assert scaled.tolist() == [-1.0, -1.0, 0.0, 1.0]
    assert outside == 1


def test_dapo_overlong_penalty():
    """2503.14476, eq. 13: none, then linear, then full."""
    config = RewardShapingConfig(max_response_length=20, overlong_buffer_length=4)
    got = shape_rewards(
        torch.ones(5), torch.tensor([10, 16, 17, 20, 25]), torch.zeros(5), config
    )
    assert got.tolist() == [1.0, 1.0, 0.75, 0.0, 0.0]


def test_penalty_for_not_stopping_and_no_penalty():
    lengths, truncated = torch.ones(2), torch.tensor([True, False])
    config = RewardShapingConfig(stop_properly_penalty_coef=0.25)
    got = shape_rewards(torch.ones(2), lengths, truncated, config)
    assert got.tolist() == [0.25, 1.0]
    same = shape_rewards(torch.ones(2), lengths, truncated, RewardShapingConfig())
    assert same.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (RewardScalingConfig, {"source_min": 1.0}, "source_min must be less"),
        (RewardShapingConfig, {"max_response_length": 4}, "overlong_buffer_length"),
        (
            RewardShapingConfig,
            {"max_response_length": 4, "stop_properly_penalty_coef": 0.5},
            "exclude each other",
        ),
    ],
)
def test_bad_settings(cls, settings, message):
    with pytest.raises(ConfigError, match=message):
        cls.from_dict(settings)
