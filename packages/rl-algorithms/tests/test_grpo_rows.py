from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.advantages import build_advantage_estimator
from rl_algorithms.advantages.kl_in_reward import add_kl_penalty
from rl_algorithms.filters import DynamicSamplingBuffer, rows_with_variance
from rl_algorithms.grpo.config import GRPOConfig, GRPOSettings
from rl_algorithms.grpo.rows import build_rows, mask_disagreement
from rl_algorithms.losses import ClippedPGLossConfig
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError


def rollout(*rewards: float, **columns: torch.Tensor) -> BatchedDataDict:
    """Return groups of two; row i has a prompt token and i + 1 sampled ones."""
    count = len(rewards)
    lengths = torch.arange(count) + 2
    place = torch.arange(int(lengths.max()))
    mask = ((place > 0) & (place < lengths[:, None])).float()
    return BatchedDataDict(
        {
            "input_ids": torch.ones(mask.shape, dtype=torch.int64),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.ones(count),
            "generation_logprobs": -mask,
            "rewards": torch.tensor(rewards),
            "group_index": torch.arange(count) // 2,
            "truncated": torch.zeros(count, dtype=torch.bool),
            "generation_lengths": lengths - 1,
            **columns,
        }
    )


def build(rows: BatchedDataDict, **settings):
    config = GRPOSettings.from_dict({"num_generations_per_prompt": 2, **settings})
    return build_rows(rows, build_advantage_estimator(config.adv_estimator), config)


def test_rows_that_teach_nothing_are_cut_off():
    rows, metrics = build(rollout(1, 0, 3, 3), drop_zero_variance_groups=True)
    assert rows is not None
    assert rows.size == 2
    # The widest rows are gone, and with them their columns.
    assert rows["input_ids"].shape == rows["generation_logprobs"].shape == (2, 3)
    assert rows["advantages"].tolist() == pytest.approx([2**0.5, -(2**0.5)])
    assert metrics["zero_variance_rate"] == 0.5
    none, metrics = build(rollout(1, 1), drop_zero_variance_groups=True)
    assert none is None
    assert metrics["zero_variance_rate"] == 1.0


def test_cut_answers_may_be_left_out():
    cut = torch.tensor([False, True, False, False])
    rows, metrics = build(rollout(1, 0, 3, 1, truncated=cut), overlong_filtering=True)
    assert rows is not None
    assert rows["input_lengths"].tolist() == [2, 4, 5]
    assert metrics["overlong_filtered_rate"] == 0.25
    rows, metrics = build(rollout(1, 0, 3, 1, truncated=cut))
    assert rows is not None
    assert rows.size == 4


def test_scaling_comes_before_shaping_and_the_spread_is_that_before():
    rows, metrics = build(
        rollout(2.0, 0.0),
        reward_scaling={"source_max": 1.0, "target_max": 10.0},
        reward_shaping={"max_response_length": 2, "overlong_buffer_length": 1},
        adv_estimator={"use_leave_one_out_baseline": False},
    )
    assert rows is not None
    # 10 and 0 become 10 and -1; the divisor is the spread of 10 and 0.
    spread = 50**0.5
    assert rows["advantages"].tolist() == pytest.approx([5.5 / spread, -5.5 / spread])
    assert float(metrics["shaped_reward"]) == 4.5
    assert float(metrics["rewards_clamped_rate"]) == 0.5


def test_kl_becomes_a_penalty_on_tokens():
    rows = rollout(1, 1)
    rows["prev_logprobs"] = -1.0 * rows["token_mask"]
    rows["prev_logprobs"][:, 0] = math.nan  # this column is never read
    rows["reference_policy_logprobs"] = -1.5 * rows["token_mask"]
    config = ClippedPGLossConfig(
        use_kl_in_reward=True,
        reference_policy_kl_type="k1",
        reference_policy_kl_penalty=0.1,
    )
    assert config.has_kl_reward
    assert not config.has_kl_term
    metrics = add_kl_penalty(rows, config)
    assert float(metrics["kl_penalty"]) == pytest.approx(0.5)
    assert rows["kl_penalty"].tolist() == [
        pytest.approx([0.0, 0.05, 0.0]),
        pytest.approx([0.0, 0.05, 0.05]),
    ]
    train, _ = build(rows, adv_estimator={"normalize_rewards": False})
    assert train is not None
    # The longer answer is further away from the reference.
    assert train["advantages"].tolist() == pytest.approx([0.05, -0.05], abs=1e-6)
    assert "prev_logprobs" in train
    token_level, metrics = build(
        rows, adv_estimator={"name": "reinforce_plus_plus", "normalize_rewards": False}
    )
    assert token_level is not None
    assert token_level["advantages"].tolist() == [
        pytest.approx([0.0, 0.95, 0.0]),
        pytest.approx([0.0, 0.9, 0.95]),
    ]
    assert metrics["advantages/min"] == pytest.approx(0.9)


def test_named_rewards_reach_gdpo_and_its_filter():
    named = {
        "reward/right": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "reward/short": torch.tensor([0.0, 1.0, 1.0, 1.0]),
    }
    rows = rollout(1, 1, 2, 2, **named)
    gdpo = {"name": "gdpo", "reward_weights": {"reward/short": 3.0}}
    train, metrics = build(rows, adv_estimator=gdpo, drop_zero_variance_groups=True)
    assert train is not None
    assert train.size == 2
    assert train["advantages"][0] < 0 < train["advantages"][1]
    assert metrics["zero_variance_rate"] == 0.5
    assert float(metrics["reward/right"]) == 0.75
    assert not rows_with_variance(rows["rewards"], rows["group_index"]).any()


def test_dynamic_sampling_by_named_rewards():
    named = {"reward/a": torch.tensor([1.0, 0.0]), "reward/b": torch.tensor([0.0, 1.0])}
    assert DynamicSamplingBuffer(2, 3, by_named_rewards=True).add(
        rollout(1, 1, **named)
    )
    buffer = DynamicSamplingBuffer(2, 3)
    assert not buffer.add(rollout(1, 1, **named))
    rows, metrics = buffer.take()
    assert rows is None
    assert metrics["dynamic_sampling_kept_rate"] == 0.0


def test_answers_on_which_the_two_models_disagree():
    rows = rollout(1, 0)
    rows["prev_logprobs"] = rows["generation_logprobs"].clone()
    rows["prev_logprobs"][1, 1] -= 2.0
    metrics = mask_disagreement(rows, 1.5)
    assert rows["sample_mask"].tolist() == [1.0, 0.0]
    assert float(metrics["seq_logprob_error_masked_rate"]) == 0.5


def test_one_answer_per_prompt():
    single = {"num_generations_per_prompt": 1}
    plus = {"adv_estimator": {"name": "reinforce_plus_plus"}}
    _, metrics = build(rollout(1, 0, 1), **single, **plus)
    assert "zero_variance_rate" not in metrics
    for settings in (
        {},
        {**plus, "use_dynamic_sampling": True},
        {**plus, "drop_zero_variance_groups": True},
        {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": True}},
    ):
        with pytest.raises(ConfigError, match="must be at least 2"):
            GRPOSettings.from_dict({**single, **settings})


def test_gdpo_refuses_what_changes_the_sum():
    model = {"policy": {"model_name": "m"}}
    gdpo = {"adv_estimator": {"name": "gdpo"}}
    with pytest.raises(ConfigError, match="reward_shaping"):
        GRPOSettings.from_dict({**gdpo, "reward_scaling": {}})
    with pytest.raises(ConfigError, match="use_kl_in_reward"):
        GRPOConfig.from_dict(
            {**model, "grpo": gdpo, "loss_fn": {"use_kl_in_reward": True}}
        )


def test_the_kl_of_a_loss_and_of_a_reward_exclude_each_other():
    with pytest.raises(ConfigError, match="use_on_policy_kl_approximation"):
        ClippedPGLossConfig.from_dict(
            {"use_kl_in_reward": True, "use_on_policy_kl_approximation": True}
        )
    with pytest.raises(ConfigError, match="outside of a run, give the number"):
        _ = ClippedPGLossConfig(
            token_level_loss=False, fixed_length_normalizer="max_new_tokens"
        ).length_normalizer
