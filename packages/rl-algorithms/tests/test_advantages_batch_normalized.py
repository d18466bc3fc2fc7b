"""REINFORCE++ and GDPO against references written row by row from their papers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rl_algorithms.advantages import (
    AdvantageConfig,
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
    build_advantage_estimator,
)
from rl_algorithms.errors import LossInputError
from rl_algorithms.testing import RewardBatch, check_estimator, reward_batch
from rl_distributed.errors import ConfigError

WIDTH = 5


def with_tokens(seed: int, *, kl: bool = False) -> RewardBatch:
    """Return rewards of rows with a token mask and a KL penalty at each token."""
    generator = torch.Generator().manual_seed(seed)
    batch = reward_batch(seed)
    shape = (len(batch.rewards), WIDTH)
    mask = (torch.rand(shape, generator=generator) > 0.4).double()
    mask[:, 2] = 1
    extra = {"token_mask": mask}
    if kl:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        extra["kl_penalty"] = 0.3 * noise * mask
    return RewardBatch(batch.rewards, batch.group_index, batch.valid_mask, extra)


def members(batch: RewardBatch, row: int) -> list[int]:
    """Return the valid rows of the group."""
    return [
        i
        for i in range(len(batch.rewards))
        if batch.group_index[i] == batch.group_index[row] and batch.valid_mask[i]
    ]


def whitened(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    if not values:
        return {}
    mean = statistics.fmean(values.values())
    std = statistics.stdev(values.values()) if len(values) > 1 else 0.0
    if std <= 1e-6 * max(abs(value) for value in values.values()):
        return dict.fromkeys(values, 0.0)
    return {place: (value - mean) / std for place, value in values.items()}


def reinforce_plus_plus(batch: RewardBatch, baseline: bool) -> list[list[float]]:
    """2501.03262, section 3: the return of each token, normalised over the batch."""
    mask = batch.extra["token_mask"]
    returns = {}
    for row in range(len(batch.rewards)):
        if not batch.valid_mask[row]:
            continue
        reward = float(batch.rewards[row])
        if baseline:
            reward -= statistics.fmean(
                float(batch.rewards[i]) for i in members(batch, row)
            )
        for t in range(WIDTH):
            if mask[row, t]:
                later = 0.0
                if "kl_penalty" in batch.extra:
                    later = math.fsum(batch.extra["kl_penalty"][row, t:].tolist())
                returns[row, t] = reward - later
    normal = whitened(returns)
    return [
        [normal.get((row, t), 0.0) for t in range(WIDTH)]
        for row in range(len(batch.rewards))
    ]


class PerToken:
    """Spreads [N] advantages over the tokens, for comparison with the reference."""

    def __init__(self, estimator) -> None:
        self._estimator = estimator

    def compute_advantage(self, rewards, groups, valid, **columns):
        found = self._estimator.compute_advantage(rewards, groups, valid, **columns)
        if found.dim() == 2:
            return found
        return found[:, None] * columns["token_mask"]


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus(kl, baseline):
    estimator = ReinforcePlusPlusAdvantageEstimator(
        AdvantageConfig(
            name="reinforce_plus_plus",
            minus_baseline=baseline,
            use_leave_one_out_baseline=False,
        )
    )
    check_estimator(
        PerToken(estimator),
        lambda seed: with_tokens(seed, kl=kl),
        lambda batch: reinforce_plus_plus(batch, baseline),
        local=False,
    )


def several_rewards(seed: int) -> RewardBatch:
    first, second = reward_batch(seed), reward_batch(seed + 1)
    named = {"reward/right": first.rewards, "reward/short": second.rewards * 100}
    named["reward/right"] = named["reward/right"].clone()
    named["reward/right"][seed % 5] = math.nan
    return RewardBatch(
        first.rewards, first.group_index, first.valid_mask, {"named_rewards": named}
    )


def gdpo(batch: RewardBatch) -> list[float]:
    """2601.05242: normalise each reward in its group, add, normalise in the batch."""
    weights = {"reward/right": 1.0, "reward/short": 0.5}
    sums = {}
    for row in range(len(batch.rewards)):
        if not batch.valid_mask[row]:
            continue
        total = 0.0
        for name, values in batch.extra["named_rewards"].items():
            group = [
                float(values[i])
                for i in members(batch, row)
                if not math.isnan(values[i])
            ]
            if math.isnan(values[row]):
                continue
            std = statistics.stdev(group) if len(group) > 1 else 0.0
            relative = float(values[row]) - statistics.fmean(group)
            total += weights[name] * relative / (std if std > 1e-6 else 1.0)
        sums[row, 0] = total
    normal = whitened(sums)
    return [normal.get((row, 0), 0.0) for row in range(len(batch.rewards))]


def test_gdpo():
    estimator = GDPOAdvantageEstimator(
        AdvantageConfig(
            name="gdpo",
            use_leave_one_out_baseline=False,
            reward_weights={"reward/short": 0.5},
        )
    )
    check_estimator(estimator, several_rewards, gdpo, local=False)


def test_gdpo_divides_by_n_minus_1_in_the_group_and_in_the_batch():
    named = {
        "reward/a": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "reward/b": torch.tensor([3.0, 1.0], dtype=torch.float64),
    }
    estimator = GDPOAdvantageEstimator(AdvantageConfig(name="gdpo"))
    got = estimator.compute_advantage(
        named["reward/a"], torch.zeros(2), named_rewards=named
    )
    assert got.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_gdpo_keeps_apart_what_sums_merge():
    """Rewards of (0, 2), (1, 1) and (2, 0) have the same sum."""
    named = {
        "reward/a": torch.tensor([0.0, 1.0, 2.0, 0.0]),
        "reward/b": torch.tensor([2.0, 1.0, 0.0, 0.0]),
    }
    groups = torch.zeros(4, dtype=torch.int64)
    total = named["reward/a"] + named["reward/b"]
    merged = GRPOAdvantageEstimator().compute_advantage(total, groups)
    assert len({round(a, 5) for a in merged.tolist()}) == 2
    weights = {"reward/a": 1.0, "reward/b": 0.25}
    apart = build_advantage_estimator(
        AdvantageConfig(name="gdpo", reward_weights=weights)
    ).compute_advantage(total, groups, named_rewards=named)
    assert len({round(a, 5) for a in apart.tolist()}) == 4


def test_gdpo_names_what_is_missing():
    estimator = GDPOAdvantageEstimator(
        AdvantageConfig(name="gdpo", reward_weights={"reward/c": 1.0})
    )
    rewards, groups = torch.zeros(2), torch.zeros(2)
    with pytest.raises(LossInputError, match=r"at least two named rewards.*none"):
        estimator.compute_advantage(rewards, groups)
    named = {"reward/a": rewards, "reward/b": rewards}
    with pytest.raises(LossInputError, match="no reward for reward/c"):
        estimator.compute_advantage(rewards, groups, named_rewards=named)


def test_the_penalty_of_an_answer_lowers_its_reward():
    """RLOO (2402.14740): the reward is the answer's own minus its KL."""
    estimator = GRPOAdvantageEstimator(AdvantageConfig(normalize_rewards=False))
    penalty = torch.tensor([[0.0, 0.5, 0.25], [0.0, 0.0, 0.0]])
    got = estimator.compute_advantage(
        torch.tensor([1.0, 1.0]), torch.zeros(2), kl_penalty=penalty
    )
    assert got.tolist() == [-0.75, 0.75]


@pytest.mark.parametrize(
    "settings",
    [
        {"reward_weights": {"reward/a": 1.0}},
        {"minus_baseline": True},
        {"name": "gdpo", "normalize_over": "batch"},
    ],
)
def test_settings_of_another_estimator_are_refused(settings):
    with pytest.raises(ConfigError, match=r"belongs to adv_estimator\.name"):
        AdvantageConfig.from_dict(settings)


def test_a_penalty_needs_the_mask_of_the_tokens():
    with pytest.raises(LossInputError, match="token_mask"):
        ReinforcePlusPlusAdvantageEstimator().compute_advantage(
            torch.zeros(2), torch.zeros(2), kl_penalty=torch.zeros(2, 3)
        )
