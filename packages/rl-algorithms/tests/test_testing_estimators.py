"""GRPO's estimator passes; each rule fails an estimator that breaks it."""

from __future__ import annotations

import statistics

import pytest
import torch

from rl_algorithms.advantages import AdvantageConfig, GRPOAdvantageEstimator
from rl_algorithms.testing import ConformanceError, check_estimator, reward_batch


def grpo(batch):
    """2402.03300, 4.1.2: (r - mean) / std, over the valid rows of the group."""
    advantages = []
    for reward, group, valid in zip(
        batch.rewards, batch.group_index, batch.valid_mask, strict=True
    ):
        members = [
            float(r)
            for r, g, v in zip(
                batch.rewards, batch.group_index, batch.valid_mask, strict=True
            )
            if g == group and v
        ]
        std = statistics.stdev(members) if len(members) > 1 else 0.0
        advantages.append(
            (float(reward) - statistics.fmean(members)) / (std or 1.0) if valid else 0.0
        )
    return advantages


ESTIMATOR = GRPOAdvantageEstimator(AdvantageConfig(use_leave_one_out_baseline=False))


def test_grpo_passes():
    check_estimator(ESTIMATOR, reward_batch, grpo)


class Broken:
    """GRPO's estimator with one defect."""

    def __init__(self, mistake: str) -> None:
        self._mistake = mistake

    def compute_advantage(self, rewards, groups, valid):
        if self._mistake == "ungrouped":
            groups = torch.zeros_like(groups)
        if self._mistake == "numbered":
            groups = groups.clamp(max=9)
        mask = None if self._mistake == "unmasked" else valid
        if self._mistake == "unguarded" and float(rewards.var()) < 1e-9:
            return rewards / 0
        advantages = ESTIMATOR.compute_advantage(rewards, groups, mask)
        if self._mistake == "whitened":
            return (advantages - advantages.mean()) / advantages.std()
        if self._mistake == "placed":
            return advantages * (1 + torch.arange(len(rewards)))
        return advantages


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        ("ungrouped", "other_groups"),
        ("numbered", "group_names"),
        ("unmasked", "rows_that_do_not_count"),
        ("unmasked", "all_masked"),
        ("unguarded", "equal_rewards"),
        ("whitened", "all_masked"),
        ("whitened", "other_groups"),
        ("placed", "row_order"),
        ("placed", "value"),
    ],
)
def test_each_mistake_is_caught_by_its_rule(mistake, check):
    with pytest.raises(ConformanceError) as caught:
        check_estimator(Broken(mistake), reward_batch, grpo, checks=[check])
    assert caught.value.check == check
