from __future__ import annotations

import statistics

import pytest
import torch

from rl_algorithms.advantages.config import AdvantageConfig
from rl_algorithms.advantages.estimators import (
    GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator,
)
from rl_algorithms.advantages.factory import build_advantage_estimator
from rl_distributed.errors import ConfigError

REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0, 2.0, -1.0, 0.0, 1.0, 3.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def compute(**settings):
    estimator = GRPOAdvantageEstimator(AdvantageConfig(**settings))
    return estimator.compute_advantage(
        torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS)
    ).tolist()


def of_group(group):
    return [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]


def test_grpo_paper_outcome_supervision():
    """2402.03300, 4.1.2: (r - mean) / std of the group."""
    want = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        rewards = of_group(group)
        std = statistics.stdev(rewards)
        want.append((reward - statistics.fmean(rewards)) / (std or 1.0))
    got = compute(use_leave_one_out_baseline=False)
    assert got == pytest.approx(want, abs=1e-12)


def test_dr_grpo_only_subtracts_the_mean():
    got = compute(use_leave_one_out_baseline=False, normalize_rewards=False)
    want = [
        r - statistics.fmean(of_group(g)) for r, g in zip(REWARDS, GROUPS, strict=True)
    ]
    assert got == pytest.approx(want, abs=1e-12)


def test_leave_one_out_is_rloo():
    """RLOO (2402.14740): r minus the mean of the others."""
    got = compute(normalize_rewards=False)
    want = [
        r - (sum(of_group(g)) - r) / 3 for r, g in zip(REWARDS, GROUPS, strict=True)
    ]
    assert got == pytest.approx(want, abs=1e-12)


def test_normalizing_over_the_batch():
    got = compute(use_leave_one_out_baseline=False, normalize_over="batch")
    std = statistics.stdev(REWARDS)
    want = [
        (r - statistics.fmean(of_group(g))) / std
        for r, g in zip(REWARDS, GROUPS, strict=True)
    ]
    assert got == pytest.approx(want, abs=1e-12)


def test_rows_that_do_not_count():
    estimator = GRPOAdvantageEstimator()
    rewards = torch.tensor([1.0, 0.0, 99.0])
    groups = torch.zeros(3, dtype=torch.int64)
    got = estimator.compute_advantage(rewards, groups, torch.tensor([1, 1, 0]))
    assert got.tolist() == pytest.approx([2**0.5, -(2**0.5), 0.0])
    none = estimator.compute_advantage(rewards, groups, torch.zeros(3))
    assert none.tolist() == [0.0, 0.0, 0.0]


def test_equal_prompts_of_different_rows_stay_apart():
    estimator = GRPOAdvantageEstimator(AdvantageConfig(normalize_rewards=False))
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    got = estimator.compute_advantage(rewards, torch.tensor([0, 0, 1, 1]))
    assert got.tolist() == [0.0] * 4


def test_clipping_raw_rewards_and_the_factory():
    rewards = torch.tensor([1.0, -3.0])
    clipped = build_advantage_estimator(
        AdvantageConfig(name="raw_reward", advantage_clip_low=-1.0)
    )
    assert isinstance(clipped, RawRewardAdvantageEstimator)
    assert clipped.compute_advantage(rewards, torch.zeros(2)).tolist() == [1.0, -1.0]
    assert isinstance(
        build_advantage_estimator(AdvantageConfig()), GRPOAdvantageEstimator
    )
    with pytest.raises(ConfigError, match="must be less than"):
        AdvantageConfig.from_dict({"advantage_clip_low": 1, "advantage_clip_high": 0})


def test_both_bounds_cut():
    config = AdvantageConfig(
        name="raw_reward", advantage_clip_low=-1.0, advantage_clip_high=2.0
    )
    rewards = torch.tensor([3.0, 1.5, -3.0])
    found = build_advantage_estimator(config).compute_advantage(rewards, torch.zeros(3))
    assert found.tolist() == [2.0, 1.5, -1.0]
