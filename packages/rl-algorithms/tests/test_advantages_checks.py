"""Rewards that do not match their rows raise a named error, never a raw torch error."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rl_algorithms import calculate_kl, masked_mean
from rl_algorithms.advantages import (
    AdvantageConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    build_advantage_estimator,
    calculate_baseline_and_std_per_group,
    calculate_baseline_and_std_per_prompt,
    scale_rewards,
    shape_rewards,
)
from rl_algorithms.advantages.overlong import mask_overlong
from rl_algorithms.errors import LossInputError
from rl_algorithms.filters import (
    mask_sequence_logprob_error,
    rows_with_variance,
)

FOUR, THREE = torch.arange(4.0), torch.arange(3.0)
GROUPS = torch.zeros(4, dtype=torch.int64)
NAMED = {"reward/a": FOUR, "reward/b": FOUR}
META = torch.ones(4, device="meta")
TOKENS = torch.ones(4, 5)

COLUMNS = {
    "group_index": (
        {"group_index": GROUPS[:3]},
        r"group_index must .*\[4\]: got \[3\]",
    ),
    "valid_mask": ({"valid_mask": torch.ones(1)}, r"valid_mask must .*: got \[1\]"),
    "std_rewards": ({"std_rewards": THREE}, r"std_rewards must .*: got \[3\]"),
    "one of several": (
        {"named_rewards": {**NAMED, "reward/b": THREE}},
        r"reward/b must .*: got \[3\]",
    ),
    "a name of its own": (
        {"named_rewards": {**NAMED, "rewards": THREE}},
        "rewards mus",
    ),
    "token_mask": (
        {"token_mask": TOKENS[:3]},
        r"must be \[N, S\] with N=4 rewards: got",
    ),
    "penalty": ({"kl_penalty": TOKENS[0]}, r"kl_penalty must be \[N, S\]"),
    "width": (
        {"token_mask": TOKENS, "kl_penalty": TOKENS[:, :4]},
        r"one width: got token_mask \[4, 5\] and kl_penalty \[4, 4\]",
    ),
    "two dimensions": (
        {"rewards": torch.ones(4, 1)},
        r"rewards must be \[N\], .*\[4, 1\]",
    ),
    "meta": ({"rewards": META}, "rewards must hold values: it is on the meta device"),
    "meta mask": ({"valid_mask": META}, "valid_mask must hold values"),
    "a list": ({"rewards": [1.0, 2.0]}, "rewards must be a tensor: got list"),
}


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus", "raw_reward"])
@pytest.mark.parametrize("case", COLUMNS)
def test_estimators_name_the_column_that_does_not_fit(name, case):
    estimator = build_advantage_estimator(AdvantageConfig(name=name))
    whole = {"rewards": FOUR, "group_index": GROUPS, "named_rewards": NAMED}
    assert len(estimator.compute_advantage(**whole)) == 4
    wrong, error = COLUMNS[case]
    with pytest.raises(LossInputError, match=error):
        estimator.compute_advantage(**{**whole, **wrong})


PENALTY = RewardShapingConfig(max_response_length=10, overlong_buffer_length=5)
CUT_OFF = RewardShapingConfig(stop_properly_penalty_coef=0.5)
FUNCTIONS = {
    "baseline, 2-D": (
        partial(calculate_baseline_and_std_per_group, TOKENS, TOKENS),
        r"rewards must be \[N\]",
    ),
    "baseline, meta": (
        partial(calculate_baseline_and_std_per_group, META, META),
        "rewards must hold values",
    ),
    "prompts": (
        partial(calculate_baseline_and_std_per_prompt, TOKENS[:3], FOUR, FOUR),
        r"prompts must be \[N, S\] with N=4",
    ),
    "prompts, meta": (
        partial(calculate_baseline_and_std_per_prompt, TOKENS.to("meta"), FOUR, FOUR),
        "prompts must hold values",
    ),
    "scaling": (
        partial(scale_rewards, TOKENS, RewardScalingConfig()),
        r"rewards must be \[N\]",
    ),
    "length penalty": (
        partial(shape_rewards, FOUR, torch.ones(1), FOUR, PENALTY),
        "generation_lengths must have the shape of rewards",
    ),
    "truncation penalty": (
        partial(shape_rewards, FOUR, FOUR, THREE, CUT_OFF),
        "truncated must have the shape of rewards",
    ),
    "variance": (
        partial(rows_with_variance, FOUR, GROUPS[:3]),
        "group_index must have the shape of rewards",
    ),
    "variance, by name": (
        partial(rows_with_variance, FOUR, GROUPS, None, {"reward/a": THREE}),
        "reward/a must have the shape of rewards",
    ),
    "overlong": (
        partial(mask_overlong, FOUR, THREE),
        r"truncated must have the shape .*\[4\].*\[3\]",
    ),
    "disagreement": (
        partial(mask_sequence_logprob_error, FOUR, TOKENS, TOKENS, TOKENS[:, :4], 2.0),
        r"prev_logprobs must have the shape .*\[4, 5\].*: got \[4, 4\]",
    ),
    "disagreement, rows": (
        partial(mask_sequence_logprob_error, THREE, TOKENS, TOKENS, TOKENS, 2.0),
        r"sample_mask must have the shape .*\[4\].*: got \[3\]",
    ),
    "mean": (partial(masked_mean, FOUR, THREE), r"values, \[4\], .*: got \[3\]"),
    "kl": (
        partial(calculate_kl, FOUR, THREE),
        r"logprobs_reference must have the shape of logprobs, \[4\]: got \[3\]",
    ),
    "weights of a kl": (
        partial(calculate_kl, FOUR, FOUR, weights=THREE),
        "weights must have the shape of logprobs",
    ),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_name_the_argument_that_does_not_fit(case):
    call, error = FUNCTIONS[case]
    with pytest.raises(LossInputError, match=error):
        call()
